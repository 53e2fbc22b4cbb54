"""Names of the formats in which models mark their reasoning and their tool calls.

Workers announce a model's; frontends have the formats (`scheduler_service.frontend.chat_formats`).
`auto` recognizes the format by the chat template and the vocabulary, `none` looks for none.
"""

_REASONING = """
auto none cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 ernie45 gemma4 glm45 glm47
granite holo2 kimi_k2 mimo minimax_m2 mistral muse_glimmer nemotron_v3 olmo3 openai_gptoss qwen3
seed_oss step3 step3p5
"""
REASONING_PARSERS = tuple(_REASONING.split())

_TOOL_CALL = """
auto none cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 ernie45
functiongemma gemma4 glm45 glm47 granite granite-20b-fc granite4 hermes jamba kimi_k2 lfm2
llama3_json llama4_json llama4_pythonic longcat mimo minimax_m2 mistral muse_glimmer olmo3 openai
phi4_mini_json pythonic qwen3_coder qwen3_xml seed_oss step3p5
"""
TOOL_CALL_PARSERS = tuple(_TOOL_CALL.split())
