"""Bodies of requests, strictly typed: null means absent, unknown fields are refused.

Ranges and everything that needs a model are checked once, behind this surface, on the engine's own message.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.http.body_types import Body, Ignored, only
from services.gateway.http.structured import Choices, Json, ResponseFormat, StructuredOutputs, Text
from services.gateway.http.tools import Calls, ToolFields, missing_content
from services.gateway.validation import MAX_LOGIT_BIASES, MAX_MESSAGES, MAX_STOP_STRINGS, MAX_STOP_TOKENS

MAX_CHOICES = 1024
"""The most choices of one HTTP request, over all its prompts."""

MAX_TOKEN_IDS = 1 << 20
"""The most ids of one prompt."""

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
ModelName = Annotated[str, Field(max_length=256, description="Name of the model; may be empty where there is one.")]
# Sizes are bounded while parsing, and a list ends at its first bad item: a large bad body costs little.
Strings = Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
StopIds = Annotated[list[Int32], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)]
TokenIds = Annotated[list[Int32], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]
Biases = Annotated[dict[str, Number], Field(fail_fast=True, max_length=MAX_LOGIT_BIASES)]


Prompt = (
    str
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Whether a last chunk tells the usage.")
    include_obfuscation: Ignored = None


class GenerationBody(Body):
    """What chat and text completions share."""

    model: ModelName = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tokens: Int32 | None = None
    temperature: Number | None = Field(None, description="0 is greedy. Default 1.")
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases | None = None
    seed: Int64 | None = None
    stop: str | Strings | None = None
    # Extensions.
    top_k: Int32 | None = Field(None, description="0 or -1 keeps all.")
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Default true.")
    use_beam_search: bool | None = Field(None, description="Answers with the n best paths of a search that wide.")
    length_penalty: Number | None = Field(None, description="Of beam search; larger favours long answers. Default 1.")
    speculation: str | int | None = Field(
        None, description='"auto", "off", or the most draft tokens of a step. It does not change the output.'
    )
    prompt_logprobs: Int32 | None = Field(None, description="Alternatives per prompt token; not when streaming.")
    priority: Int32 | None = Field(
        None,
        description="Larger is more urgent (in vLLM, smaller is). Range [-100, 100], up to what the API key allows.",
    )

    response_format: ResponseFormat | None = Field(None, description="What the output must be; as all rules, enforced.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same as vLLM has it: one rule.")
    guided_json: Json | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_decoding_backend: Ignored = None
    guided_whitespace_pattern: Annotated[Any, only()] = None

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None


class CompletionRequest(GenerationBody):
    prompt: Prompt
    logprobs: Int32 | None = Field(None, description="Alternatives per output token.")
    best_of: Int32 | None = Field(None, description="Width of beam search, by default n. Else it must equal n.")
    echo: Annotated[Any, only(False)] = None
    suffix: Annotated[Any, only("")] = None


class EmbeddingRequest(Body):
    model: ModelName = ""
    input: Prompt = Field(description="A text or token ids, or a list of either: each becomes a vector.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description='"base64" is of little-endian float32. Default float.'
    )
    dimensions: Int32 | None = Field(None, description="None but the model's own: a part of its vector is no vector.")
    pooling: Literal["last", "mean"] | None = Field(
        None, description="Of which tokens' states the vector is made: the last one's, or all. Default last."
    )
    priority: Int32 | None = None
    user: Ignored = None


class TextPart(Body):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _textonly(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in (None, "text"):
            raise PydanticCustomError("unsupported_parameter", "only parts of type text are supported")
        return value


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class Message(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None = Field(None, description="May be absent beside tool_calls.")
    name: str | None = None
    # What a client that sends back an answer's own message brings along.
    refusal: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    tool_calls: Calls | None = Field(default=None, description="Of an assistant's message.")
    tool_call_id: str | None = Field(default=None, description="The call that a message of the role tool answers.")
    reasoning_content: str | None = Field(default=None, description="What the assistant thought first.")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise missing_content()
        return self


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(GenerationBody, ToolFields):
    messages: Messages
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None

    prompt_cache_retention: Ignored = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None


class TokenizeRequest(ToolFields):
    """Either a prompt, or messages and what goes with them."""

    model: ModelName = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Whether text gets a beginning token. Default true.")


class DetokenizeRequest(Body):
    model: ModelName = ""
    tokens: TokenIds
    skip_special_tokens: bool | None = Field(None, description="Default true.")
