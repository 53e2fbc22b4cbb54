"""The names of the package, which are imported on first use."""

from pagewire.v1.inference_service_pb2 import (
    Timings as Timings,
    ToolCallDelta as ToolCallDelta,
    Usage as Usage,
)
from pagewire_client.async_client import AsyncClient as AsyncClient
from pagewire_client.batch import BatchProgress as BatchProgress
from pagewire_client.chat import (
    ChatMessage as ChatMessage,
    ChatPrompt as ChatPrompt,
    Tool as Tool,
    ToolCall as ToolCall,
)
from pagewire_client.client import Client as Client
from pagewire_client.connection import TlsOptions as TlsOptions
from pagewire_client.deployment import (
    EngineStatus as EngineStatus,
    Adapter as Adapter,
    ModelInfo as ModelInfo,
)
from pagewire_client.errors import (
    AlreadyExists as AlreadyExists,
    DeadlineExceeded as DeadlineExceeded,
    FailedPrecondition as FailedPrecondition,
    InvalidArgument as InvalidArgument,
    LocalServiceError as LocalServiceError,
    NotAuthorized as NotAuthorized,
    NotFound as NotFound,
    Overloaded as Overloaded,
    PagewireError as PagewireError,
    RequestAborted as RequestAborted,
    ServerError as ServerError,
    Unavailable as Unavailable,
)
from pagewire_client.llm import (
    LLM as LLM,
    AsyncLLM as AsyncLLM,
)
from pagewire_client.outputs import (
    CompletionOutput as CompletionOutput,
    Logprob as Logprob,
    OutputDelta as OutputDelta,
    OutputToolCall as OutputToolCall,
    RequestOutput as RequestOutput,
    TextLogprobs as TextLogprobs,
)
from pagewire_client.pooling import (
    Classification as Classification,
    RankedDocument as RankedDocument,
)
from pagewire_client.retry import (
    NO_RETRIES as NO_RETRIES,
    RetryPolicy as RetryPolicy,
)
from pagewire_client.sampling_params import (
    SamplingOptions as SamplingOptions,
    SamplingParams as SamplingParams,
)
