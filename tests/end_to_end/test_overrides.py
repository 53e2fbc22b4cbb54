"""A worker's chat template and defaults of generations reach clients."""

from pathlib import Path
from typing import Any

import openai

from tests.support.cluster import Cluster
from tests.support.worker_flags import FLOAT32

TEMPLATE = """\
{{ start }}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}"""


def test_clients_have_the_template_and_the_defaults_of_the_worker(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = [
        *("--chat-template", str(template), "--hf-overrides", '{"max_position_embeddings": 96}'),
        *("--generation-config", "vllm", "--default-chat-template-kwargs", '{"start": "27"}'),
        *("--override-generation-config", '{"temperature": 0.0, "max_new_tokens": 3}'),
    ]
    cluster = Cluster(
        tmp_path, worker_flags=[*FLOAT32, *flags], frontend_flags=["--http", "127.0.0.1:0"]
    )
    with cluster:
        url = f"{cluster.start().http_url()}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            [model] = client.models.list()
            messages = [{"role": "user", "content": "27 + 45 ="}]
            asked: dict[str, Any] = {
                "model": model.id,
                "extra_body": {"ignore_eos": True, "add_special_tokens": False},
            }
            chat = client.chat.completions.create(messages=messages, **asked)
            own = {**asked["extra_body"], "chat_template_kwargs": {"start": ""}}
            other = client.chat.completions.create(
                messages=messages, model=model.id, extra_body=own
            )
            prompt = "27user: 27 + 45 =\n"
            texts = [
                client.completions.create(prompt=prompt, max_tokens=3, **asked) for _ in range(2)
            ]
    assert model.model_extra["max_model_len"] == 96
    assert chat.usage.completion_tokens == 3
    assert chat.usage.prompt_tokens > other.usage.prompt_tokens > 10
    assert {text.choices[0].text for text in texts} == {chat.choices[0].message.content}
    assert chat.usage.prompt_tokens == texts[0].usage.prompt_tokens
