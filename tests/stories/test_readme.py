"""The Python programs in README.md run as they are printed there."""

import re
from pathlib import Path

import pytest
from parallel.programs import Programs

README = Path(__file__).parents[2] / "README.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_has_a_program() -> None:
    assert len(PROGRAMS) == 1


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.count(chr(10))} lines")
def test_a_program_of_the_readme_runs(program: str, tmp_path: Path, programs: Programs) -> None:
    completed = programs.script(program, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert re.fullmatch(
        r"(?:(?:onnx|tflite) float 9\d\.\d\d %, int8 9\d\.\d\d %, agreeing .* labels\n){2}", completed.stdout
    )
    assert (tmp_path / "bundle" / "bundle.sig").is_file()
