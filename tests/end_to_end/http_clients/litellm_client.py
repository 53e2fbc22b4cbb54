"""Ask a question by LiteLLM, whole and streamed; print both answers as JSON."""

import json
import sys

import litellm

settings = {
    "model": "hosted_vllm/embedded",
    "api_base": f"{sys.argv[1]}/v1",
    "messages": [{"role": "user", "content": sys.argv[2]}],
    "temperature": 0,
}
whole = litellm.completion(**settings).choices[0].message.content
chunks = litellm.completion(**settings, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print(json.dumps([whole, streamed]))
