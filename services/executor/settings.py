"""Settings of an executor."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from services.common.kv_policy import HOT_TOKENS, OLDEST, PERIOD, WARM_TOKENS, KvAges, KvPolicy
from services.common.settings import NamedPath, RedisUrl, ServiceSettings
from services.common.sizes import parse_size
from services.executor.speculation.setting import parse_draft
from services.executor.tiers.pools import MOST_BLOCKS

BackendName = Literal["auto", "cpu", "torch", "cuda"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]
KvFormatName = Literal["auto", "fp32", "bf16"]
InstructionSet = Literal["auto", "portable", "avx2", "avx512", "avx512_vnni"]
NumaNode = Literal["auto", "none"] | int


class ExecutorSettings(ServiceSettings):
    """Computes: holds one model's weights and KV, and runs the steps that its scheduler grants."""

    listen: str = Field("127.0.0.1:50054", description="address to serve gRPC on: host:port or unix:PATH")
    metrics_listen: str = Field("127.0.0.1:9104", description="host:port of the Prometheus endpoint; empty serves none")
    kvmanager: str = Field("127.0.0.1:50053", description="the kvmanager's address; empty reports to none")
    model: str | None = Field(None, description="folder, .gguf file, hub id or catalogue entry; absent waits for one")
    model_name: str | None = Field(None, description="the name that clients ask for; absent takes it from the model")
    backend: BackendName = Field(
        "auto", description="what computes; auto takes the best for this machine and model, but never cuda yet"
    )
    deterministic: bool = Field(
        False, description="a token's bits do not depend on its batch: always so with cpu, at some cost with cuda"
    )
    dtype: Dtype = Field("auto", description="number format of weights; auto takes the backend's best for the file")
    kv_format: KvFormatName = Field("auto", description="number format of keys and values; auto follows the weights")
    instruction_set: InstructionSet = Field(
        "auto", description="what the cpu backend is to use of this CPU; auto takes the best"
    )
    draft: str = Field(
        "none", description="what proposes draft tokens: none, ngram, early-exit, early-exit:LAYERS, or a draft model"
    )
    threads: int = Field(0, ge=0, description="compute threads; 0 takes one per CPU that the process may use")
    numa_node: NumaNode = Field(
        "auto", description="node to compute on and take memory from; none; auto: the GPU's or the only usable one"
    )
    context_length: int | None = Field(None, ge=2, description="most tokens of prompt plus output; absent: the model's")
    kv: KvAges = Field("hot", description="KV formats by age: hot is kv_format, warm int8, cold int4")
    kv_hot_tokens: int = Field(
        HOT_TOKENS, ge=1, lt=OLDEST, description="newest tokens that stay hot where older ones are warm"
    )
    kv_warm_tokens: int = Field(
        WARM_TOKENS, ge=2, lt=OLDEST, description="newest tokens that are hot or warm where older ones are cold"
    )
    kv_memory: str = Field(
        "auto",
        description='"auto" (a quarter of the free memory at most; on a GPU, what is free) or a size like "2GiB"',
    )
    kv_blocks: int | None = Field(
        None, ge=1, le=MOST_BLOCKS, description="exact number of KV blocks in each format, instead of kv_memory"
    )
    kv_host_memory: str | None = Field(None, description="host memory for KV that a GPU has no room for, as 16GiB")
    kv_disk: NamedPath | None = Field(
        None, description="folder for KV that memory has no room for; outlives the executor"
    )
    kv_disk_size: str = Field("4GiB", description="the most that this executor writes there")
    kv_remote: RedisUrl | None = Field(None, description="redis://HOST:PORT to share KV through; others: rediss, unix")
    block_size: int = Field(32, ge=1, le=1024, description="token slots per KV block")
    max_sequences: int = Field(64, ge=1, le=4096, description="most sequences that one step computes")
    max_step_tokens: int = Field(512, ge=1, le=65536, description="most tokens that one step computes")
    step_timeout_seconds: float = Field(
        60.0, gt=0, description="a step that takes longer makes the executor NOT_SERVING"
    )

    @field_validator("numa_node", mode="before")
    @classmethod
    def _check_node(cls, value: str | int) -> str | int:
        if not re.fullmatch(r"auto|none|[0-9]{1,9}", text := str(value)):
            raise ValueError(f"{text} is neither auto, none nor the number of a node")
        return value

    @field_validator("draft")
    @classmethod
    def _check_draft(cls, value: str) -> str:
        parse_draft(value)
        return value

    @field_validator("kv_memory")
    @classmethod
    def _check_memory(cls, value: str) -> str:
        if value != "auto":
            parse_size(value)
        return value

    @field_validator("kv_host_memory", "kv_disk_size")
    @classmethod
    def _check_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> ExecutorSettings:
        if self.max_step_tokens < self.max_sequences:
            raise ValueError("max_step_tokens: at least max_sequences, or not all of them could decode in one step")
        if self.kv != "hot" and PERIOD % self.block_size:
            raise ValueError(f"block_size: {self.block_size} does not divide {PERIOD}, as kv={self.kv} demands")
        if self.kv == "hot+warm+cold" and self.kv_warm_tokens < self.kv_hot_tokens + PERIOD:  # cold is made of warm
            raise ValueError(f"kv_warm_tokens: at least {PERIOD} more than kv_hot_tokens")
        if parse_draft(self.draft).model is not None:
            if self.kv != "hot":
                raise ValueError(f"draft: keys and values of a draft model stay hot; kv is {self.kv}")
            if self.kv_host_memory is not None or self.kv_disk is not None or self.kv_remote is not None:
                raise ValueError("draft: beside a draft model, KV does not move to lower tiers")
        if self.model_name is not None and self.model is None:
            raise ValueError("model_name: needs model")
        return self

    @property
    def kv_policy(self) -> KvPolicy:
        """Which formats KV takes at which ages."""
        return KvPolicy.named(self.kv, self.kv_hot_tokens, self.kv_warm_tokens)
