"""Flags of other engines: each one is accepted, or explained."""

import pytest
from typer.testing import CliRunner

from pagewire_cli import foreign_flags
from pagewire_cli.app import app
from pagewire_cli.command import CONTEXT, ServeCommand, _repeat_lists
from pagewire_cli.local import engine_args
from tests.docs.test_site import flags
from tools.docs.command_line import commands
from tools.launch import ROOT

THEIRS = (ROOT / "tests/docs/vllm_0_32_flags.txt").read_text().split()

OTHERS = dict(
    part.split("\n", 1)  # the engine, and its flags
    for part in (ROOT / "tests/docs/other_engines_flags.txt").read_text().split("### ")[1:]
)
"""Of llama-server 0.6.0 (build 11434), and of the documentation of SGLang, TGI 3 and TEI 1.8."""


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_every_flag_of_vllm_has_a_counterpart_or_a_reason() -> None:
    assert [flag for flag in THEIRS if not foreign_flags.rows_of(flag)] == []
    unexplained = [
        row.flags
        for row in foreign_flags.rows()
        if not (row.counterparts or row.is_always or row.remark)
    ]
    assert unexplained == []


@pytest.mark.parametrize("engine", OTHERS)
def test_every_flag_of_another_engine_is_explained(engine: str) -> None:
    ours = flags()
    foreign = [flag for flag in OTHERS[engine].split() if flag not in ours]
    assert len(foreign) > 20
    lines = [foreign_flags.explain(flag, ours) for flag in foreign]
    assert [line for line in lines if "no such option" in line] == []


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("-ngl", "-ngl is --device here (cpu, cuda or cuda:N: a worker has all its layers on one"),
        ("--mem-fraction-static", "--mem-fraction-static is --gpu-memory-utilization here (a sh"),
        (
            "-n",
            "-n is --num-nodes, --node-rank here (on pagewire worker); that of llama.cpp has no",
        ),
        ("--no-mmap", "--no-mmap has no counterpart here: weights are mapped into memory and read"),
        ("--num-shard", "--num-shard is --tensor-parallel-size here (1 by default)"),
        ("--dense-path", "--dense-path has no counterpart here: dense layers are those of modules"),
        ("--speculative-modl", "--speculative-modl: no such option; did you mean --speculative-m"),
    ],
)
def test_serve_explains_flags_of_other_engines(flag: str, line: str) -> None:
    assert refused("serve", "model", flag, "9").startswith(f"error: {line}")


def test_switches_of_other_engines_that_are_always_on_are_accepted() -> None:
    said = refused("serve", "model", "--jinja", "-cb", "--enable-metrics", "--whatever")
    assert said == "error: --whatever: no such option\n"


def test_no_flag_of_a_service_is_mistaken_for_one_that_only_vllm_has() -> None:
    ours = {
        flag
        for name, command in commands()
        if name in ("serve", "worker", "scheduler", "frontend")
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    assert len(ours) > 100
    assert {flag for flag in ours if foreign_flags.is_foreign(flag)} == set()


def test_serve_answers_each_of_vllms_flags_with_its_row() -> None:
    ours = flags()
    foreign = [flag for flag in THEIRS if flag not in ours and not foreign_flags.is_always_on(flag)]
    lines = refused("serve", "model", *foreign).removeprefix("error: ").splitlines()
    assert len(lines) == len(foreign) > 250
    for flag, line in zip(foreign, lines, strict=True):
        row = foreign_flags.rows_of(flag)[0]
        expected = row.counterparts[0] if row.counterparts else row.remark
        assert line.startswith(f"{flag} ")
        assert expected in line


def test_all_unknown_options_are_explained_in_one_message() -> None:
    said = refused(
        *("serve", "model", "--enforce-eager", "--fully_sharded_loras"),
        *("--logits-processors=x", "-ep", "-O3", "--max-model-lem", "9", "--whatever"),
        *("--enforce-eagr", "-c", "4096", "--lora", "x.gguf"),
        *("--speculative-config.method", "ngram", "--no-enable-expert-parallel"),
    )
    assert said.startswith("error: --enforce-eager is --no-cuda-graphs here\n")
    assert "--fully-sharded-loras has no counterpart here: what workers compute does not" in said
    assert "--logits-processors has no counterpart here: the server runs no plugins" in said
    assert "-ep has no counterpart here: each rank has some columns of every expert" in said
    assert "-O is --compile here" in said
    assert "--max-model-lem: no such option; did you mean --max-model-len?" in said
    assert "--whatever: no such option\n" in said
    assert "--enforce-eagr: no such option; --enforce-eager is --no-cuda-graphs here\n" in said
    assert "\n-c is --max-model-len here (of each request, not shared by all slots)\n" in said
    assert "\n--lora is --enable-lora, --lora-modules here (NAME=PATH of a PEFT folder" in said
    assert "--speculative-config.method is --speculative, " in said
    assert "--no-enable-expert-parallel has no counterpart here" in said


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("tensor_parallel_size", "2x", "a whole number"), ("watermark", [], "a number")],
)
def test_the_argument_of_llm_whose_value_is_no_number_is_named(
    name: str, value: object, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected {expected}, got "):
        engine_args.check_names({name: value})


@pytest.mark.parametrize("flag", ["--enable-auto-tool-choice", "--enable_prompt_tokens_details"])
def test_a_switch_that_is_always_on_is_accepted_but_not_its_opposite(flag: str) -> None:
    said = refused("serve", "model", flag, "--whatever")
    assert said == "error: --whatever: no such option\n"
    opposite = flag.replace("--", "--no-")
    assert "cannot be given here: it is always on" in refused("serve", "model", opposite)


@pytest.mark.parametrize("command", ["worker", "scheduler", "frontend"])
def test_a_service_alone_explains_vllms_flags_too(command: str) -> None:
    said = refused(command, "--enforce-eager", "--seed=3")
    assert said.startswith("error: --enforce-eager is --no-cuda-graphs here\n--seed has no count")


def test_another_command_names_near_options_only() -> None:
    assert refused("generate", "--api-kye", "x", "--enable-lora") == (
        "error: --api-kye: no such option; did you mean --api-key?\n--enable-lora: no such option\n"
    )


def test_text_after_a_double_dash_is_no_option() -> None:
    result = CliRunner().invoke(app, ["generate", "--address", "nowhere", "--", "--enable-lora"])
    assert result.exit_code == 1
    assert "--address: expected HOST:PORT" in str(result.exception)


def test_several_values_of_a_list_are_the_option_repeated() -> None:
    args = ["--served-model-name", "a", "b", "c", "--dtype", "half", "--api_key", "k", "l"]
    assert _repeat_lists(args, 9) == [
        *("--served-model-name", "a", "--served-model-name", "b", "--served-model-name", "c"),
        *("--dtype", "half", "--api_key", "k", "--api-key", "l"),
    ]
    assert _repeat_lists(["--served-model-name", "a", "MODEL"], 0)[-1:] == ["MODEL"]


@pytest.mark.parametrize(
    ("arguments", "names", "model"),
    [
        (["m", "--served-model-name", "a", "b"], ["a", "b"], "m"),
        (["--model", "m", "--served-model-name", "a", "b", "-tp", "2"], ["a", "b"], None),
        (["--served_model_name", "a", "b", "m", "--dtype", "half"], ["a", "b"], "m"),
        (["--served-model-name", "a", "m"], ["a"], "m"),
    ],
)
def test_serve_reads_several_names_as_vllm_does(
    arguments: list[str], names: list[str], model: str | None
) -> None:
    import typer

    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert isinstance(command, ServeCommand)
    context = command.make_context("serve", arguments, **CONTEXT)
    assert list(context.params["served_model_name"]) == names
    assert context.params["checkpoint"] == model


def test_serve_reads_several_adapters_as_vllm_does() -> None:
    args = ["m", "--enable-lora", "--lora-modules", "sql=/a", "support=/b"]
    assert _repeat_lists(args, 1)[2:] == [
        "--lora-modules",
        "sql=/a",
        "--lora-modules",
        "support=/b",
    ]


def test_llm_explains_all_unknown_arguments_together() -> None:
    with pytest.raises(TypeError) as raised:
        engine_args.check_names(
            {"enforce_eager": True, "data_parallel_size": 2, "seed": 0, "dtpe": "half", "xyz": 1}
        )
    assert str(raised.value).splitlines() == [
        "unknown engine flags:",
        "enforce_eager is cuda_graphs=False here",
        "data_parallel_size is num_workers here (on pagewire serve; elsewhere start more workers)",
        "seed has no counterpart here: a request's seed; a request without one gets a drawn seed,"
        " which the answer reports",
        "dtpe: no such option; did you mean dtype?",
        "xyz: no such option",
    ]


def test_llm_accepts_switches_that_are_always_on() -> None:
    assert engine_args.check_names({"disable_log_requests": True, "dtype": "half"}) == {
        "dtype": "half"
    }
    with pytest.raises(TypeError, match="disable_log_requests cannot be given"):
        engine_args.check_names({"disable_log_requests": False})
