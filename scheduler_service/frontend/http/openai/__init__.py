"""OpenAI's API: `/v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/models`.

| module | holds |
| --- | --- |
| `protocol` | bodies of requests and responses |
| `sampling` | their sampling parameters, and how these become a protobuf message |
| `serving` | what the endpoints share: JSON or server-sent events, log probabilities |
| `parts` | what `/v1/responses` shares with Anthropic's API: answers that are lists of parts |
| `serving_chat`, `serving_completion`, `serving_responses` | the endpoints |
| `models` | `/v1/models` |
| `adapters` | vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` |
"""
