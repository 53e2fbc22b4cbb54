"""What models write: thoughts and calls in each format, by hand from their chat templates."""

import json
from typing import NamedTuple

from scheduler_service.frontend.chat_formats.events import Functions

FUNCTIONS: Functions = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "note": {"type": "string"}},
    },
    "now": None,
}
PARIS = {"city": "Paris", "days": 3}
NOTE = 'say "hi" {there},\tnow'
ADD = {"a": 1.5, "note": NOTE}


class Calls(NamedTuple):
    """`get_weather(PARIS)` and `add(ADD)`, with what is around them."""

    opening: str
    first: str
    between: str
    second: str
    closing: str

    def one(self) -> str:
        return self.opening + self.first + self.closing

    def two(self) -> str:
        return self.opening + self.first + self.between + self.second + self.closing


def _object(name: str, arguments: object, keys: tuple[str, str] = ("name", "arguments")) -> str:
    return json.dumps({keys[0]: name, keys[1]: arguments})


_FIRST, _SECOND = _object("get_weather", PARIS), _object("add", ADD)
_PARAMETERS = (
    _object("get_weather", PARIS, ("name", "parameters")),
    _object("add", ADD, ("name", "parameters")),
)
_COHERE = tuple(
    json.dumps({"tool_call_id": str(index), "tool_name": name, "parameters": arguments})
    for index, (name, arguments) in enumerate([("get_weather", PARIS), ("add", ADD)])
)
_PYTHON = "get_weather(city='Paris', days=3)", "add(a=1.5, note='say \"hi\" {there},\\tnow')"
_CODER = (
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>",
    "<function=add>\n<parameter=a>\n1.5\n</parameter>\n"
    f"<parameter=note>\n{NOTE}\n</parameter>\n</function>",
)

CALLS: dict[str, Calls] = {
    "hermes": Calls(
        "<tool_call>\n", _FIRST, "\n</tool_call>\n<tool_call>\n", _SECOND, "\n</tool_call>"
    ),
    "qwen3_coder": Calls(
        "<tool_call>\n", _CODER[0], "\n</tool_call>\n<tool_call>\n", _CODER[1], "\n</tool_call>"
    ),
    "seed_oss": Calls(
        "<seed:tool_call>\n",
        _CODER[0],
        "\n</seed:tool_call>\n<seed:tool_call>\n",
        _CODER[1],
        "\n</seed:tool_call>",
    ),
    "glm45": Calls(
        "<tool_call>",
        "get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
        "</tool_call>\n<tool_call>",
        "add\n<arg_key>a</arg_key>\n<arg_value>1.5</arg_value>\n"
        f"<arg_key>note</arg_key>\n<arg_value>{NOTE}</arg_value>\n",
        "</tool_call>",
    ),
    "glm47": Calls(
        "<tool_call>",
        "get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value>",
        "</tool_call><tool_call>",
        "add<arg_key>a</arg_key><arg_value>1.5</arg_value>"
        f"<arg_key>note</arg_key><arg_value>{NOTE}</arg_value>",
        "</tool_call>",
    ),
    "muse_glimmer": Calls(
        "",
        'to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        "",
        'to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n'
        '<atem:parameter name="a">1.5</atem:parameter>\n'
        f'<atem:parameter name="note">{NOTE}</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>",
        "",
    ),
    "minimax_m2": Calls(
        "<minimax:tool_call>\n",
        '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>',
        "\n",
        '<invoke name="add">\n<parameter name="a">1.5</parameter>\n'
        f'<parameter name="note">{NOTE}</parameter>\n</invoke>',
        "\n</minimax:tool_call>",
    ),
    "deepseek_v32": Calls(
        "<｜DSML｜function_calls>\n",
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>',
        "\n",
        '<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1.5</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="note" string="true">{NOTE}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>",
        "\n</｜DSML｜function_calls>",
    ),
    "deepseek_v3": Calls(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{json.dumps(PARIS)}\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        f"{json.dumps(ADD)}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Calls(
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{json.dumps(PARIS)}<｜tool▁call▁end｜>",
        "",
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{json.dumps(ADD)}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": Calls(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{json.dumps(PARIS)}<|tool_call_end|>",
        "",
        "<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>"
        f"{json.dumps(ADD)}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "mistral": Calls("[TOOL_CALLS][", _FIRST, ", ", _SECOND, "]"),
    "mistral, by name": Calls(
        "",
        f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(PARIS)}",
        "",
        f"[TOOL_CALLS]add[CALL_ID]9chars123[ARGS]{json.dumps(ADD)}",
        "",
    ),
    "llama3_json": Calls("", _PARAMETERS[0], "; ", _PARAMETERS[1], ""),
    "llama3_json, marked": Calls("<|python_tag|>", _PARAMETERS[0], "; ", _PARAMETERS[1], ""),
    "pythonic": Calls("[", _PYTHON[0], ", ", _PYTHON[1], "]"),
    "llama4_pythonic": Calls("<|python_start|>[", _PYTHON[0], ", ", _PYTHON[1], "]<|python_end|>"),
    "lfm2": Calls("<|tool_call_start|>[", _PYTHON[0], ", ", _PYTHON[1], "]<|tool_call_end|>"),
    "olmo3": Calls("<function_calls>", _PYTHON[0], "\n", _PYTHON[1], "</function_calls>"),
    "granite": Calls("<|tool_call|>[", _FIRST, ", ", _SECOND, "]"),
    "phi4_mini_json": Calls("functools[", _FIRST, ", ", _SECOND, "]"),
    "phi4_mini_json, in tokens": Calls("<|tool_call|>[", _FIRST, ", ", _SECOND, "]<|/tool_call|>"),
    "cohere_command3": Calls(
        "<|START_ACTION|>[\n    ", _COHERE[0], ",\n    ", _COHERE[1], "\n]<|END_ACTION|>"
    ),
    "openai": Calls(
        "",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{json.dumps(PARIS)}<|call|>",
        "",
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
        f"{json.dumps(ADD)}<|call|>",
        "",
    ),
    "gemma4": Calls(
        "",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        "",
        f'<|tool_call>call:add{{a:1.5,note:<|"|>{NOTE}<|"|>}}<tool_call|>',
        "",
    ),
    "functiongemma": Calls(
        "",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        "",
        f"<start_function_call>call:add{{a:1.5,note:<escape>{NOTE}<escape>}}<end_function_call>",
        "",
    ),
    "jamba": Calls("<tool_calls>[\n", _FIRST, ",\n", _SECOND, "\n]</tool_calls>"),
    "longcat": Calls(
        "<longcat_tool_call>",
        _FIRST,
        "</longcat_tool_call>\n<longcat_tool_call>",
        _SECOND,
        "</longcat_tool_call>",
    ),
    "granite-20b-fc": Calls("<function_call>", _FIRST, "\n<function_call>", _SECOND, ""),
}
"""By `--tool-call-parser`, and a comment."""

THOUGHTS: dict[str, tuple[str, str, str]] = {
    "qwen3": ("<think>\n", "\n</think>\n\n", ""),
    "deepseek_r1": ("<think>\n", "\n</think>\n\n", ""),
    "mistral": ("[THINK]", "[/THINK]", ""),
    "granite": ("Here is my thought process:", "Here is my response:", ""),
    "ernie45": ("<think>", "</think>\n<response>", "</response>"),
    "cohere_command3": (
        "<|START_THINKING|>",
        "<|END_THINKING|><|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ),
    "gemma4": ("<|channel>thought\n", "\n<channel|>", ""),
    "seed_oss": ("<seed:think>", "</seed:think>", ""),
    "muse_glimmer": (
        " to=self<|message|>",
        "<|eom|><|start|>assistant to=user<|message|>",
        "<|eot|>",
    ),
    "openai_gptoss": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "",
    ),
}
"""Before and after a thought, and after the answer, by `--reasoning-parser` and a comment."""
