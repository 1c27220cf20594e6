"""What was rehearsed need not be compiled when a request comes."""

from pathlib import Path

from adaptivespec.config import load_settings
from adaptivespec.kernels import acceptance, worth
from adaptivespec.local import LocalSystem
from adaptivespec.policy import make_policy
from adaptivespec.rehearsal import rehearse
from adaptivespec.request import GenerationRequest
from tests.factories import write_hf_folder

COMPILED = [
    *(acceptance.follow, acceptance.measure, worth.accepted_nodes, worth.outcomes),
    *(worth.count, worth.forecast, worth.appraise),
]


def test_steps_compile_nothing_that_was_rehearsed(tmp_path: Path) -> None:
    args = {
        "model": {"path": str(write_hf_folder(tmp_path)), "dtype": "float32"},
        "target": {"compute": {"threads": 1}},
        "drafter": {"kind": "lookup"},
        "policy": {"kind": "goodput"},
    }
    system = LocalSystem.load(load_settings(args))
    rehearse(make_policy(system.settings.policy))
    rehearsed = [len(each.signatures) for each in COMPILED]
    assert all(rehearsed)
    request = GenerationRequest(prompt=[5, 9, 5, 9, 5, 9], max_tokens=60, ignore_eos=True)
    (deltas,) = system.generate([request])
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.drafted_tokens > 0
    assert [len(each.signatures) for each in COMPILED] == rehearsed
