"""From a checked body to a GenerationRequest: the checks that need the model and its limits."""

import random
from http import HTTPStatus

from adaptivespec.config import check_guards, check_shape
from adaptivespec.errors import ConfigError
from adaptivespec.request import GenerationRequest
from adaptivespec.sampling import SamplingParams
from adaptivespec.tokenizer import Tokenizer
from deployments.openai.errors import INVALID_REQUEST, ApiError, ErrorDetail, invalid, shown
from deployments.openai.requests import ChatBody, CompletionBody, GenerationBody, Speculation
from deployments.status import Status

MAX_CHARS_PER_TOKEN = 32
"""Text longer than this times the context is refused before it is tokenised. English has four
characters a token; only a text of endless blanks would have fitted."""


def check_model(model: str, status: Status) -> None:
    """Raises ApiError (404) unless `model` is the one that is served."""
    if model != status.model:
        message = f"model: {shown(model)} does not exist; {shown(status.model)} does"
        detail = ErrorDetail(message, INVALID_REQUEST, "model", "model_not_found")
        raise ApiError(HTTPStatus.NOT_FOUND, detail)


def chat_prompt(body: ChatBody, tokenizer: Tokenizer, status: Status) -> list[int]:
    """Token ids of the conversation. Takes up to seconds for megabytes of text."""
    messages = [message.for_template() for message in body.messages]
    _check_chars(sum(len(message["content"]) for message in messages), "messages", status)
    return tokenizer.apply_chat_template(messages)


def completion_prompt(body: CompletionBody, tokenizer: Tokenizer, status: Status) -> list[int]:
    """Token ids of the prompt. Takes up to seconds for megabytes of text."""
    prompt = body.single_prompt()
    if isinstance(prompt, str):
        _check_chars(len(prompt), "prompt", status)
        return tokenizer.encode(prompt)
    for i, token in enumerate(prompt):
        if not 0 <= token < status.vocab_size:
            message = f"prompt[{i}]: {token} is no token; 0 to {status.vocab_size - 1} are"
            raise invalid(message, f"prompt[{i}]")
    return prompt


def generation_request(
    body: ChatBody | CompletionBody, prompt: list[int], status: Status, traceparent: str | None
) -> GenerationRequest:
    """The request for the backend. Raises ApiError (400) for what exceeds `status`'s limits."""
    sampling = _sampling(body, status)
    speculation = body.speculation or Speculation()
    _check_speculation(speculation, sampling, status)
    stop = body.stop or ()
    return GenerationRequest(
        prompt=prompt,
        max_tokens=_max_tokens(body, len(prompt), status),
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=bool(body.ignore_eos),
        mode=speculation.mode,
        kappa=status.kappa if speculation.kappa is None else speculation.kappa,
        shape=speculation.shape,
        guards=speculation.guards,
        traceparent=traceparent,
    )


def _check_chars(chars: int, param: str, status: Status) -> None:
    limit = status.context_length * MAX_CHARS_PER_TOKEN
    if chars > limit:
        raise invalid(
            f"{param}: {chars} characters are more than the model's context of "
            f"{status.context_length} tokens can hold; at most {limit} are allowed",
            param,
            "context_length_exceeded",
        )


def _max_tokens(body: ChatBody | CompletionBody, prompt_tokens: int, status: Status) -> int:
    """Tokens that may be generated; all that the context has room for when the body names none."""
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if prompt_tokens == 0:
        raise invalid(f"{param}: empty; at least one token is needed", param)
    room = status.context_length - prompt_tokens
    wanted = body.max_tokens
    if isinstance(body, ChatBody):
        wanted = body.max_completion_tokens or wanted
    if room < 1 or (wanted is not None and wanted > room):
        completion = f" and {wanted} in the completion" if wanted is not None else ""
        raise invalid(
            f"This model's maximum context length is {status.context_length} tokens. However, you "
            f"requested {prompt_tokens} tokens in {param}{completion}; at least one is generated.",
            param,
            "context_length_exceeded",
        )
    return room if wanted is None else wanted


def _sampling(body: GenerationBody, status: Status) -> SamplingParams:
    top_k = body.top_k or 0
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=top_k if 0 < top_k < status.vocab_size else 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=0.0 if body.min_p is None else body.min_p,
        seed=random.getrandbits(63) if body.seed is None else body.seed,
    )


def _check_speculation(speculation: Speculation, sampling: SamplingParams, status: Status) -> None:
    kappa, shape = speculation.kappa, speculation.shape
    if kappa is not None and kappa < 1 and not sampling.greedy:
        raise invalid(
            f"speculation.kappa: {kappa} acts at temperature 0 only, and temperature is "
            f"{sampling.temperature}; 1 is allowed",
            "speculation.kappa",
        )
    if kappa is not None and kappa < 1 and speculation.mode == "off":
        raise invalid(
            f"speculation.kappa: {kappa} acts on drafted tokens, and mode is 'off'; 1 is allowed",
            "speculation.kappa",
        )
    try:
        check_guards(speculation, "speculation.")
    except ConfigError as error:
        raise invalid(str(error), "speculation.promotion_window") from error
    if shape is None:
        return
    if speculation.mode != "static":
        raise invalid(
            f"speculation.shape: {list(shape)} is allowed with mode 'static' only, "
            f"not {speculation.mode!r}",
            "speculation.shape",
        )
    try:
        check_shape(shape, "speculation.shape", status.max_shape)
    except ConfigError as error:
        raise invalid(str(error), "speculation.shape") from error
