"""The Python programs in README.md, and the first one of docs/edge.md, run as they are printed there."""

import re
from pathlib import Path

from parallel.programs import Programs

ROOT = Path(__file__).parents[2]


def programs_in(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_program_of_the_readme_trains_on_simulated_clients(tmp_path: Path, programs: Programs) -> None:
    (program,) = programs_in("README.md")
    completed = programs.script(program, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert float(completed.stdout) > 0.7, completed.stdout


def test_the_first_program_about_the_edge_exports_a_bundle(tmp_path: Path, programs: Programs) -> None:
    completed = programs.script(programs_in("docs/edge.md")[0], cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert re.fullmatch(
        r"(?:(?:onnx|tflite) float 9\d\.\d\d %, int8 9\d\.\d\d %, agreeing .* labels\n){2}", completed.stdout
    )
    assert (tmp_path / "bundle" / "bundle.sig").is_file()
