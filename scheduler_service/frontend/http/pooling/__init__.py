"""Vectors, scores, ranks and labels over HTTP, as OpenAI, Cohere, Jina and vLLM answer them.

| module | holds |
| --- | --- |
| `endpoints` | the endpoints, and their answers |
| `bodies` | the types of requests and answers |
| `requests` | bodies as the requests that a gRPC client would send |
| `encoding` | vectors as JSON, base64, integers and bits |
| `serving` | a call's way from its body to its answer, which is sent in parts |
"""
