"""`serve run serve_config.yaml` imports `build` from here."""

from typing import Any

from ray import serve
from ray.serve import Application

from adaptivespec.config import load_settings
from deployments.cell import bundles, tracing_env
from deployments.ingress import Ingress
from deployments.orchestrator import Orchestrator

# The queue is the orchestrator's own, which answers 429 when it is full; Serve's would only hide
# requests from it.
_UNBOUNDED = 100_000


def build(args: dict[str, Any]) -> Application:
    """The application: an ingress over one orchestrator, whose placement group has a bundle for
    each of its actors. `args` as in serve_config.yaml; raises ConfigError naming what is wrong."""
    settings = load_settings(args)
    env = tracing_env()
    runtime_env = {"env_vars": env}
    orchestrator = serve.deployment(
        Orchestrator,
        name="Orchestrator",
        max_ongoing_requests=_UNBOUNDED,
        placement_group_bundles=bundles(settings),
        placement_group_strategy="STRICT_PACK" if settings.on_one_node else "PACK",
        ray_actor_options={"num_cpus": settings.orchestrator_cpus, "runtime_env": runtime_env},
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        max_ongoing_requests=_UNBOUNDED,
        ray_actor_options={"num_cpus": settings.ingress_cpus, "runtime_env": runtime_env},
    )
    return ingress.bind(settings, orchestrator.bind(settings, env))
