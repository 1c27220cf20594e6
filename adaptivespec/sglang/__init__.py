"""The method inside SGLang: its scheduler, paged and radix KV cache, tensor parallelism and graphs,
with our policy, margin rule and remote drafter in its speculative step.

`plugin` is the entry point that SGLang calls in each of its processes; it registers the algorithm
ADAPTIVESPEC, whose `worker` runs in the scheduler. `launch` starts an engine with it. Written
against SGLang 0.5.23: only its registry is a stable interface, so `compat` checks the rest.
"""
