"""``fanin infer`` on pixels, tables and labels: the printed classes, and the refusals."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import BundleFor
from onnx import helper
from PIL import Image
from support import linear, scalar
from support.commands import Fanin, fanin_in_process, one_line, usage_line
from support.models import write_copy
from support.values import PUBLISHER

from fanin.commands.console.samples import Target, read_samples
from fanin.edge.assembly.assemble import assemble
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.signatures import Port
from fanin.protos.errors import InvalidInput

X = np.random.default_rng(3).standard_normal((5, linear.NUM_INPUTS)).astype(np.float32)
LOGITS = X @ linear.WEIGHT + linear.BIAS
CLASSES = LOGITS.argmax(1)
PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a Bundle of three classes, a file that flattens pixels, and data."""
    monkeypatch.chdir(tmp_path)
    assemble(linear.linear_graphs(), tmp_path / "bundle", PUBLISHER)
    ports = [[linear.port(name, *shape)] for name, shape in (("x", ("n", 3, 4, 6)), ("flat", ("n", 72)))]
    (tmp_path / "flat.onnx").write_bytes(linear.file([helper.make_node("Flatten", ["x"], ["flat"])], *ports))
    np.savez("labelled.npz", x=X, y=CLASSES)
    Image.fromarray(PIXELS).save("pixels.png")
    Path("names.txt").write_text("shirt\nshoe\nbag\n")
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_classes_are_printed_with_names_probability_and_accuracy(fanin: Fanin) -> None:
    words = ("infer", "bundle", "--data", "labelled.npz", "--classes", "names.txt")
    lines = fanin(*words).out.splitlines()
    probability = np.exp(LOGITS[0]).max() / np.exp(LOGITS[0]).sum()
    name = ("shirt", "shoe", "bag")[CLASSES[0]]
    assert lines[:2] == ["sample  probability  class", f"     0  {probability:11.4f}  {CLASSES[0]} {name}"]
    assert lines[-1] == "accuracy 1.0000 of 5 samples"
    row = json.loads(fanin(*words, "--json").out)
    assert [prediction["class"] for prediction in row["predictions"]] == CLASSES.tolist()
    assert row["predictions"][0] == {"class": CLASSES[0], "name": name, "probability": pytest.approx(probability)}
    np.savez("labelled.npz", x=X, y=[*CLASSES[:3], *(CLASSES[3:] + 1) % 3])
    assert json.loads(fanin(*words, "--json").out)["accuracy"] == 0.6


@pytest.mark.usefixtures("folder")
def test_a_table_is_read_with_its_labels(fanin: Fanin) -> None:
    rows = [",".join(["y", *(f"pixel{index}" for index in range(6))])]
    rows += [",".join([str(label), *map(str, values)]) for label, values in zip(CLASSES, X, strict=True)]
    Path("rows.csv").write_text("\n".join(rows) + "\n")
    outcome = fanin("infer", "bundle", "--data", "rows.csv", "--json", "--out", "logits.npy")
    assert json.loads(outcome.out)["accuracy"] == 1.0
    np.testing.assert_allclose(np.load("logits.npy"), LOGITS, atol=1e-5)


@pytest.mark.usefixtures("folder")
def test_images_are_divided_by_the_scale_and_put_channels_first(fanin: Fanin) -> None:
    words = ("infer", "flat.onnx", "--data", "pixels.png", "--data", "pixels.png", "--scale", "255", "--out", "out.npy")
    outcome = fanin(*words)
    assert outcome.status == 0, outcome
    expected = np.moveaxis(PIXELS, -1, 0).reshape(-1).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(np.load("out.npy"), [expected, expected])


def test_images_are_classified_by_a_bundle(fanin: Fanin, bundle_for: BundleFor, tmp_path: Path) -> None:
    bundle, pixels = bundle_for("mlp", "onnx"), np.arange(2 * 64, dtype=np.uint8).reshape(2, 8, 8)
    write_copy(bundle, tmp_path / "bundle")
    for name, image in zip("ab", pixels, strict=True):
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    words = ("--data", tmp_path / "a.png", "--data", tmp_path / "b.png", "--scale", "255", "--json")
    row = json.loads(fanin("infer", tmp_path / "bundle", *words).out)
    predict = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())
    logits = predict({"x": pixels[:, None].astype(np.float32) / np.float32(255)})
    assert [prediction["class"] for prediction in row["predictions"]] == logits.argmax(1).tolist()
    np.testing.assert_allclose(row["outputs"]["logits"]["values"], logits, rtol=1e-6)


@pytest.mark.usefixtures("folder")
def test_labels_of_a_file_of_another_origin_are_counted_if_they_are_classes(fanin: Fanin) -> None:
    ports = [linear.port("x", "n", 6)], [linear.port("scores", "n", 3)]
    node = helper.make_node("MatMul", ["x", "w"], ["scores"])
    Path("scores.onnx").write_bytes(linear.file([node], *ports, {"w": linear.WEIGHT}))
    np.savez("labelled.npz", x=X, y=(X @ linear.WEIGHT).argmax(1))
    out = fanin("infer", "scores.onnx", "--data", "labelled.npz").out
    assert out.startswith("scores  float32 (5, 3)\n")
    assert out.endswith("\naccuracy 1.0000 of 5 samples\n")
    np.savez("labelled.npz", x=X, y=np.arange(5) + 10)
    assert "accuracy" not in fanin("infer", "scores.onnx", "--data", "labelled.npz").out


@pytest.mark.usefixtures("folder")
def test_classes_of_pixels_are_counted(fanin: Fanin) -> None:
    shape = (2, 5, 6, 3)
    ports = [linear.port("x", "n", *shape[1:])], [linear.port("scores", "n", *shape[1:])]
    Path("pixels.onnx").write_bytes(linear.file([helper.make_node("Neg", ["x"], ["scores"])], *ports))
    labels = np.arange(60).reshape(2, 5, 6) % 3
    x = -10.0 * np.eye(3, dtype=np.float32)[labels]
    labels[0, 0, 0], labels[1, 0] = 2, -1
    np.savez("labelled.npz", x=x, y=labels)
    words = ("infer", "pixels.onnx", "--data", "labelled.npz", "--classes", "names.txt")
    assert fanin(*words).out.splitlines() == [
        "sample  positions of each class",
        *(f"     {index}  shirt: 10, shoe: 10, bag: 10" for index in range(2)),
        f"accuracy {53 / 54:.4f} of 54 positions",
    ]
    row = json.loads(fanin(*words, "--json").out)
    assert row["accuracy"] == 53 / 54
    assert row["predictions"][1]["classes"] == (np.arange(30, 60).reshape(5, 6) % 3).tolist()


@pytest.mark.usefixtures("folder")
def test_a_large_output_is_summarized(fanin: Fanin) -> None:
    shape = (2, 3, 40, 50)
    ports = [linear.port("x", "n", *shape[1:])], [linear.port("scores", "n", *shape[1:])]
    Path("pixels.onnx").write_bytes(linear.file([helper.make_node("Neg", ["x"], ["scores"])], *ports))
    np.save("x.npy", np.linspace(-1.0, 3.0, 12000, dtype=np.float32).reshape(shape))
    words = ("infer", "pixels.onnx", "--data", "x.npy")
    lines = [
        "scores  float32 (2, 3, 40, 50)",
        "from -3 to 1, mean -1",
        "(--out FILE.npz or --json FILE writes all values)",
    ]
    assert fanin(*words).out.splitlines() == lines
    assert fanin(*words, "--out", "out.npz").out.splitlines() == lines[:2]
    assert np.load("out.npz")["scores"].shape == shape


@pytest.mark.heavy
@pytest.mark.usefixtures("folder")
def test_the_classes_of_the_words_of_short_sequences_are_printed(fanin: Fanin, bundle_for: BundleFor) -> None:
    """The model computes over the shortest length that holds the rows, and the labels are cut to it."""
    from support.models import write_copy

    bundle = bundle_for("tags", "onnx")
    write_copy(bundle, Path("tags"))
    x = np.zeros((3, 16), np.int64)
    x[:, :4] = [[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]]
    logits = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters())({"x": x[:, :4].astype(np.int32)})
    classes, labels = logits.argmax(-1), np.full((3, 16), -1)
    labels[:2, :2] = classes[:2, :2]
    labels[0, 0] = (labels[0, 0] + 1) % 3
    np.savez("labelled.npz", x=x, y=labels)
    assert fanin("infer", "tags", "--data", "labelled.npz").out.splitlines() == [
        "sample  classes of positions",
        *(f"     {index}  {' '.join(map(str, row))}" for index, row in enumerate(classes)),
        "accuracy 0.7500 of 4 positions",
    ]


@pytest.mark.usefixtures("folder")
def test_a_table_with_targets_has_the_squared_error_of_one_value(fanin: Fanin) -> None:
    assemble(scalar.scalar_graphs(), Path("values"), PUBLISHER)
    x, y = scalar.examples(5, 0.1)
    rows = ["a,b,c,target", *(",".join(map(str, [*values, target])) for values, (target,) in zip(x, y, strict=True))]
    Path("rows.csv").write_text("\n".join(rows) + "\n")
    lines = fanin("infer", "values", "--data", "rows.csv", "--out", "out.npy").out.splitlines()
    error = np.square(np.load("out.npy").astype(float) - y).mean()
    assert lines[-1] == f"mean squared error {error:.6g}"
    np.savez("column.npz", x=x, y=y)
    assert fanin("infer", "values", "--data", "column.npz").out.splitlines()[-1] == lines[-1]
    outcome = fanin("infer", "values", "--data", "column.npz", "--classes", "names.txt")
    assert one_line(outcome, "infer") == (
        "--classes: got it for values, a bundle of values, expected a model of classes; remove it"
    )


@pytest.mark.heavy
@pytest.mark.usefixtures("folder")
def test_the_squared_error_of_values_is_printed(fanin: Fanin) -> None:
    import torch
    from support.models import export_bundle, write_copy

    from fanin.edge.export import App, squared_error

    module = torch.nn.Linear(6, 2)
    app = App(name="values", module=module, calibration=torch.from_numpy(X), batch_size=2, loss=squared_error)
    write_copy(export_bundle(app), Path("values"))
    np.savez("labelled.npz", x=X, y=np.zeros((5, 2), np.float32))
    outcome = fanin("infer", "values", "--data", "labelled.npz", "--out", "out.npy")
    error = np.square(np.load("out.npy").astype(float)).mean()
    assert outcome.out.splitlines()[-1] == f"mean squared error {error:.6g}"
    # Integers are targets here, not classes.
    np.savez("labelled.npz", x=X, y=np.zeros(5, np.int64))
    outcome = fanin("infer", "values", "--data", "labelled.npz")
    assert one_line(outcome, "infer") == "labels: got y (5,), expected (5, 2) like the output; remove y"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("flat.onnx", "--data", "pixels.png"),
            "pixels.png: got uint8 (1, 3, 4, 6) for x, expected float32 (n, 3, 4, 6) in",
        ),
        (
            ("flat.onnx", "--data", "bytes.npy"),
            "bytes.npy: got uint8 (2, 3, 4, 6) for x, expected float32 (n, 3, 4, 6) in",
        ),
        (
            ("flat.onnx", "--data", "wide.png"),
            "wide.png: got an image of 4 x 7 pixels (height x width), expected 4 x 6;",
        ),
        (("flat.onnx", "--data", "text.png"), "text.png: not a readable image"),
        (("flat.onnx", "--data", "deep.png"), "deep.png: got an image of mode I;16, expected 8 bits a channel"),
        (("bundle", "--data", "pixels.png"), "pixels.png: got an image, expected samples (6,) of the input 'x'"),
        (
            ("bundle", "--data", "labelled.npz", "--scale", "255"),
            "--scale: got 255 for x float32, expected it for",
        ),
        (
            ("bundle", "--data", "short.csv"),
            "short.csv: got 2 values a row, expected 6 for the input 'x' float32 (n, 6); name",
        ),
        (("bundle", "--data", "ragged.csv"), "ragged.csv: line 2: got 5 values, expected 6 as in the first row"),
        (
            ("bundle", "--data", "words.csv"),
            "words.csv: line 2: got 'abc', expected a number; separate",
        ),
        (("bundle", "--data", "empty.csv"), "empty.csv: has no rows, expected one row of numbers for each sample"),
        (("bundle", "--data", "none.npz"), "none.npz: got 0 samples in x, expected at least one"),
        (("flat.onnx", "--data", "none.npy"), "none.npy: got 0 samples in x, expected at least one"),
        (
            ("bundle", "--data", "labelled.npz", "--classes", "text.png"),
            "--classes: got 1 name, expected 3, one for each",
        ),
        (("bundle", "--data", "pairs.npz"), "labels: got y int64 (5, 2) from 0 to 0, expected integers (5,) from 0 to"),
        (
            ("bundle", "--data", "others.npz"),
            "labels: got y int64 (5,) from 0 to 9, expected integers (5,)",
        ),
        (
            ("bundle", "--data", "shifted.npz"),
            "labels: got y int64 (5,) from 1 to 3, expected integers (5,) from 0 to 2; count classes from 0: y - 1",
        ),
        (("bundle", "--data", "texts.npz"), "texts.npz: got no numbers in 'y', expected arrays of numbers; write labe"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.usefixtures("folder")
def test_data_that_does_not_fit_is_one_clear_line(fanin: Fanin, words: tuple[str, ...], message: str) -> None:
    np.save("bytes.npy", np.zeros((2, 3, 4, 6), np.uint8))
    np.savez("pairs.npz", x=X, y=np.zeros((5, 2), np.int64))
    np.savez("others.npz", x=X, y=np.array([0, 1, 2, 3, 9]))
    np.savez("shifted.npz", x=X, y=np.array([1, 1, 2, 3, 3]))
    np.savez("texts.npz", x=X, y=np.array(["bag"] * 5))
    Image.fromarray(np.zeros((4, 7, 3), np.uint8)).save("wide.png")
    Image.fromarray(np.zeros((4, 6), np.uint16)).save("deep.png")
    Path("text.png").write_text("no image")
    Path("short.csv").write_text("1,2\n")
    Path("ragged.csv").write_text("1,2,3,4,5,6\n1,2,3,4,5\n")
    Path("words.csv").write_text("a,b,c,d,e,f\n1,2,3,4,5,abc\n")
    Path("empty.csv").write_text("")
    np.savez("none.npz", x=X[:0], y=np.zeros(0, np.int64))
    np.save("none.npy", np.zeros((0, 3, 4, 6), np.float32))
    assert one_line(fanin("infer", *words), "infer").startswith(message)


@pytest.mark.usefixtures("folder")
def test_several_files_that_are_no_images_are_wrong_usage(fanin: Fanin) -> None:
    message = usage_line(fanin("infer", "bundle", "--data", "labelled.npz", "--data", "bytes.npy"), "infer")
    assert message == "--data: got 2 files, expected one, or several images"


@pytest.mark.usefixtures("folder")
def test_images_without_pillow_name_the_extra(fanin: Fanin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    outcome = fanin("infer", "flat.onnx", "--data", "pixels.png", "--scale", "255")
    assert one_line(outcome, "infer") == "PIL is not installed here; pip install 'fanin[images]'"


def test_pixels_of_a_model_with_preprocess_stay_bytes(tmp_path: Path) -> None:
    path = tmp_path / "pixels.png"
    Image.fromarray(PIXELS).save(path)
    x, raw = Port(name="x", dtype="float32", shape=(-1, 3, 4, 6)), Port(name="raw", dtype="uint8", shape=(-1, 4, 6, 1))
    ((name, array),) = read_samples([path], Target(inputs=(x,), raw=raw), 0.0).feed.items()
    assert (name, array.dtype, array.shape) == ("x", np.uint8, (1, 4, 6, 1))
    np.testing.assert_array_equal(array[0, :, :, 0], np.asarray(Image.fromarray(PIXELS).convert("L")))
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "\n".join([",".join(["label", *(f"p{index}" for index in range(24))]), ",".join(map(str, range(25)))])
    )
    samples = read_samples([rows], Target(inputs=(x,), raw=raw), 0.0)
    assert samples.labels is not None
    assert samples.labels.tolist() == [0]
    np.testing.assert_array_equal(samples.feed["x"].ravel(), np.arange(1, 25, dtype=np.uint8))


def test_a_table_of_tokens_holds_integers(tmp_path: Path) -> None:
    target = Target(inputs=(Port(name="x", dtype="int32", shape=(-1, 3)),))
    path = tmp_path / "tokens.csv"
    path.write_text("1,2,3\n4,5,6\n")
    array = read_samples([path], target, 0.0).feed["x"]
    assert array.dtype == np.int32
    assert array.tolist() == [[1, 2, 3], [4, 5, 6]]
    path.write_text("1,2,3.5\n")
    with pytest.raises(InvalidInput, match="FN-1035"):
        read_samples([path], target, 0.0)
