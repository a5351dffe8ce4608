"""A failure whose text is longer than a report may be."""

from pathlib import Path

from support.scripted import FailingTrainer, run, scripted_coordinator

from fanin.protos import messages as m


def test_a_long_failure_is_cut_to_the_length_of_a_report(tmp_path: Path) -> None:
    script = scripted_coordinator(tmp_path)
    run(script, tmp_path, FailingTrainer(ValueError("x" * 10_000)))
    (failure,) = script.failures
    assert failure.startswith("training: xxx")
    assert len(failure) == m.MAX_FAILURE_CHARS
