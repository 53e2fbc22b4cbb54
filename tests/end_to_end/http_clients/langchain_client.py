"""Ask a question by LangChain, whole and streamed; print both answers as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="embedded", base_url=f"{sys.argv[1]}/v1", api_key="none", temperature=0)
whole = model.invoke(sys.argv[2]).content
streamed = "".join(chunk.content for chunk in model.stream(sys.argv[2]))
print(json.dumps([whole, streamed]))
