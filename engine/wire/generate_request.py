"""A request to an engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.wire.part_record import Asking
from engine.wire.sampling_params import SamplingParams

TRIAL_TOKENS = 8  # after which a request on trial is no suspect any more
TRIAL_S = 30.0  # after which the next suspect does not wait any longer for the one that is tried


class ModelIdentity(msgspec.Struct, frozen=True):
    """Digests that tell apart models, and versions of one model."""

    weights: str
    """Digest of config.json and the weights."""
    vocabulary: str
    """Digest of the meaning of each token id; empty for a model without a tokenizer. Engines with the same vocabulary
    understand each other's prompts, whatever their weights."""


class GenerateRequest(Asking, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate, in token ids, or a prompt for which a part has an answer. A client's request with
    `n > 1` has become several of these."""

    request_id: str
    """Unique among the live requests of an engine; also the source of the seed if none is given."""
    prompt: list[int]
    params: SamplingParams = SamplingParams()
    reply_to: str = ""
    """ZMQ address of the ingress's token channel; empty for in-process use."""
    client: str = ""
    """Client to whom grammars and held blocks are charged, and whose requests share its turns in an engine."""
    timeout_s: float | None = None
    """Seconds from arrival after which the engine ends the request; None for no limit."""
    priority: int = 0
    """Smaller runs first; used by the `priority` policy only."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests that have the same salt."""
    prefill: Literal["auto", "local", "remote"] = "auto"
    """Where the prompt is computed. With `remote` the request fails if no other engine can compute it."""
    num_prompt: int | None = None
    """Length of the actual prompt. The tokens of `prompt` after that length are output of another replica: they count
    as output for penalties, min_tokens and max_tokens. None if all tokens are prompt."""
    model: ModelIdentity | None = None
    """Model that must serve the request: replicas of other models refuse it. None allows any."""
    session_id: str = ""  #: routers send requests of one session to one engine if they can; engines ignore it
    numerics: str = ""  #: digest of what computed its output so far; routers prefer engines with the same one
    on_trial: bool = False
    """Whether it is tried apart from others that ran in an engine that ended by itself, because it may be the cause."""
    when_idle: bool = False
    """Whether the request runs only on an idle engine: it is refused, or aborted, if the engine has other work."""
    ttft_slo_s: float | None = None  #: seconds from arrival within which the client wants the first token

    def continued(self, output: list[int]) -> GenerateRequest:
        """Return the request for another engine, which continues after this output; prompt_logprobs came before it."""
        params = msgspec.structs.replace(self.params, prompt_logprobs=None) if output else self.params
        prompt = [*self.prompt, *output]
        return msgspec.structs.replace(self, prompt=prompt, num_prompt=len(self.prompt), params=params)
