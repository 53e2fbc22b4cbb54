"""Get vectors and ranks by the clients of OpenAI, LangChain, LiteLLM, LlamaIndex and Cohere, and
print them as JSON by client."""

import json
import sys

import cohere
import litellm
import openai
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

URL, MODEL = sys.argv[1], "embedder"
TEXTS = sys.argv[2:]
DIMENSIONS = 2
CALL = {"model": MODEL, "input": TEXTS}
OPENAI = {"api_base": f"{URL}/v1", "api_key": "none"}


def by_openai(**fields):
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        return [entry.embedding for entry in client.embeddings.create(**CALL, **fields).data]


def by_langchain(**fields):
    settings = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none"}
    client = OpenAIEmbeddings(**settings, check_embedding_ctx_length=False, **fields)
    return [*client.embed_documents(TEXTS[:-1]), client.embed_query(TEXTS[-1])]


def by_litellm(provider, **fields):
    call = {"model": f"{provider}/{MODEL}", "input": TEXTS}
    return [entry["embedding"] for entry in litellm.embedding(**call, **OPENAI, **fields).data]


def by_llama_index():
    client = OpenAILikeEmbedding(model_name=MODEL, **OPENAI)
    return client.get_text_embedding_batch(TEXTS)


def by_cohere(kind, **fields):
    client = cohere.ClientV2(api_key="none", base_url=URL)
    answer = client.embed(
        model=MODEL, texts=TEXTS, input_type="classification", embedding_types=[kind], **fields
    )
    return getattr(answer.embeddings, "float_" if kind == "float" else kind)


def ranks_by_cohere():
    client = cohere.ClientV2(api_key="none", base_url=URL)
    answer = client.rerank(model=MODEL, query=TEXTS[0], documents=TEXTS, top_n=2)
    return [result.index for result in answer.results]


def ranks_by_litellm(provider, url):
    answer = litellm.rerank(
        model=f"{provider}/{MODEL}",
        query=TEXTS[0],
        documents=TEXTS,
        top_n=2,
        api_base=url,
        api_key="none",
    )
    return [result["index"] for result in answer.results]


print(
    json.dumps(
        {
            "full": {
                "openai": by_openai(),
                "openai, lists": by_openai(encoding_format="float"),
                "langchain": by_langchain(),
                "litellm": by_litellm("openai"),
                "litellm, hosted_vllm": by_litellm("hosted_vllm"),
                "llama_index": by_llama_index(),
                "cohere": by_cohere("float"),
            },
            "short": {
                "openai": by_openai(dimensions=DIMENSIONS),
                "langchain": by_langchain(dimensions=DIMENSIONS),
                "litellm, hosted_vllm": by_litellm("hosted_vllm", dimensions=DIMENSIONS),
                "cohere": by_cohere("float", output_dimension=DIMENSIONS),
            },
            "int8": by_cohere("int8"),
            "ranks": {
                "cohere": ranks_by_cohere(),
                "litellm, hosted_vllm": ranks_by_litellm("hosted_vllm", URL),
                "litellm, jina_ai": ranks_by_litellm("jina_ai", f"{URL}/v1/rerank"),
            },
        }
    )
)
