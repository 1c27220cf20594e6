"""The entry point `sglang.srt.plugins`: registers the algorithm ADAPTIVESPEC.

SGLang calls it in every one of its processes, and logs and swallows what it raises; whoever starts
an engine therefore calls `check_registration` first.
"""

from typing import TYPE_CHECKING, Any

from adaptivespec.errors import ConfigError
from adaptivespec.sglang.compat import SUPPORTED, check_compatibility

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ALGORITHM = "ADAPTIVESPEC"


def register() -> None:
    """Make the algorithm known to this process's SGLang. Raises ConfigError when SGLang is not the
    one that this plugin was written for."""
    check_compatibility()
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class AdaptiveSpec(CustomSpecAlgo):
        """To SGLang, an algorithm whose trees come from the host, like its n-gram one: the draft
        phase has no KV cache there and carries nothing from one step to the next."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def create_future_map(self, device: Any, *args: Any, **kwargs: Any) -> FutureMap:
            return FutureMap(device, self, *args, **kwargs)

    def create(server_args: "ServerArgs") -> type:
        from adaptivespec.sglang.worker import AdaptiveSpecWorker

        return AdaptiveSpecWorker

    SpeculativeAlgorithm.register(
        ALGORITHM, spec_class=AdaptiveSpec, validate_server_args=check_server_args
    )(create)


def check_server_args(server_args: "ServerArgs") -> None:
    """Refuse what the worker cannot do. Raises ValueError naming the argument."""
    unsupported = {
        "disable_overlap_schedule": (False, "is needed"),
        "enable_mixed_chunk": (True, "is not supported"),
        "enable_hierarchical_cache": (True, "is not supported: it would lose the drafter's states"),
        "enable_dp_attention": (True, "is not supported"),
        "enable_two_batch_overlap": (True, "is not supported"),
        "speculative_adaptive": (True, "is SGLang's own policy; this algorithm has its own"),
    }
    for name, (value, reason) in unsupported.items():
        if getattr(server_args, name) == value:
            flag = name.replace("_", "-")
            raise ValueError(f"--speculative-algorithm {ALGORITHM}: --{flag} {reason}")
    for name in ("pp_size", "dp_size", "nnodes"):
        if (size := getattr(server_args, name)) != 1:
            raise ValueError(
                f"--speculative-algorithm {ALGORITHM}: --{name.replace('_', '-')} {size} is not "
                "supported; 1 is"
            )
    if server_args.disaggregation_mode != "null":
        raise ValueError(
            f"--speculative-algorithm {ALGORITHM}: --disaggregation-mode "
            f"{server_args.disaggregation_mode} is not supported"
        )
    backend, page_size = server_args.attention_backend, server_args.page_size or 1
    if server_args.device == "cuda" and backend not in ("flashinfer", "triton"):
        raise ValueError(
            f"--speculative-algorithm {ALGORITHM}: --attention-backend {backend} is not supported; "
            "flashinfer and triton read tree masks"
        )
    if page_size > 1 and backend != "flashinfer":
        raise ValueError(
            f"--speculative-algorithm {ALGORITHM}: --page-size {page_size} with "
            f"--attention-backend {backend} is not supported; with flashinfer it is"
        )


def check_registration() -> None:
    """Load SGLang's plugins in this process and see that ours is among them. Raises ConfigError
    with the reason, which SGLang would only log."""
    check_compatibility()
    from importlib.metadata import entry_points

    from sglang.srt.environ import envs
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins
    from sglang.srt.speculative.spec_registry import get_spec

    ours = [
        point.name
        for point in entry_points(group=GENERAL_PLUGINS_GROUP)
        if point.value == f"{__name__}:register"
    ]
    if not ours:
        raise ConfigError(
            "engine: 'sglang' needs this package installed, for SGLang finds plugins by their "
            "entry points: pip install -e '.[sglang]'"
        )
    allowed = envs.SGLANG_PLUGINS.get()
    if allowed and ours[0] not in [name.strip() for name in allowed.split(",")]:
        raise ConfigError(f"SGLANG_PLUGINS: {allowed!r} leaves out {ours[0]!r}, which is needed")
    load_plugins()
    if get_spec(ALGORITHM) is None:
        raise ConfigError(
            f"SGLang has not registered {ALGORITHM}; its log says why (this plugin works with "
            f"sglang=={SUPPORTED})"
        )
