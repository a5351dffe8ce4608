"""The options of ``fanin join``, and their checks."""

import argparse
from typing import Final

from fanin.clients.device.storage.cache import DEFAULT_MAX_BYTES
from fanin.clients.device.training.resuming import DEFAULT_SAVE_S
from fanin.clients.device.training.tuning import FineTuning
from fanin.clients.device.training.work import WorkLimit
from fanin.clients.pins import parse_fingerprint
from fanin.commands.console.streams import LogFormat
from fanin.commands.console.usage import Parser
from fanin.protos.addresses import check_remote, parse_page_address
from fanin.protos.errors import InvalidInput

MAX_APP_FAILURES: Final = 8
"""With the coordinator's growing pauses, the last failure comes after 5 minutes. A temporary cause has ended by that
time."""


def fine_tuning_of(options: argparse.Namespace) -> FineTuning | None:
    """Return how the device fine-tunes; None if it does not. Raises InvalidInput."""
    return FineTuning(epochs=options.fine_tune, learning_rate=options.fine_tune_rate) if options.fine_tune else None


def join_parser() -> Parser:
    """Return the parser of ``fanin join``."""
    parser = Parser(
        prog="fanin join",
        description="Take part in federated training as one device: check in, train on local data, upload.",
        epilog="The folder --state holds the device's key, its downloads and its unfinished update. "
        "A device that is stopped at any moment resumes when it is started again.",
    )
    _add_coordinator(parser)
    parser.add_argument(
        "--data",
        metavar="FILE.npz",
        help="examples: an array for each input of the model, such as x, and y; required without --flower",
    )
    parser.add_argument(
        "--validation", type=float, default=0.2, metavar="SHARE", help="held out for validation (0.2); 0: none"
    )
    parser.add_argument(
        "--partition",
        type=int,
        metavar="N",
        help="index of this data in the population (0); the coordinator warns of two devices with one index",
    )
    parser.add_argument("--state", default="fanin-device", metavar="DIR", help="this device's folder (fanin-device)")
    parser.add_argument(
        "--runtime", metavar="NAME", help="runtime to train with (the first installed of onnx, litert, tflite)"
    )
    parser.add_argument(
        "--serve", action="store_true", help="keep the newest version ready as an int8 model, for fanin infer"
    )
    parser.add_argument(
        "--cache-mb", type=int, default=DEFAULT_MAX_BYTES >> 20, metavar="MB", help="disk space for downloads (256)"
    )
    parser.add_argument(
        "--web",
        metavar="[HOST:]PORT",
        help="serve a page with the state of this device, on this machine only; 0: any port",
    )
    parser.add_argument("--no-condition", action="store_true", help="do not report battery and network in check-ins")
    _add_flower(parser)
    parser.add_argument("--quiet", action="store_true", help="log warnings and errors only, not each step of a round")
    parser.add_argument("--max-updates", type=int, default=0, metavar="N", help="stop after N accepted updates")
    parser.add_argument(
        "--max-failures",
        type=int,
        metavar="N",
        help="end with an error after N failed trainings in a row, 0 for never "
        f"({MAX_APP_FAILURES} with --flower, else 0)",
    )
    parser.add_argument(
        "--delay-seed", type=int, metavar="SEED", help="seed of a random delay before each upload, to vary the order"
    )
    _add_training(parser)
    _add_telemetry(parser)
    return parser


def _add_coordinator(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the coordinator, and whom the device trusts."""
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="the coordinator")
    authority = parser.add_mutually_exclusive_group(required=True)
    authority.add_argument("--ca", metavar="FILE", help="certificate of the coordinator's authority")
    authority.add_argument(
        "--ca-fingerprint",
        metavar="SHA256",
        help="fingerprint of that certificate, which fanin serve prints: the device reads the certificate from the "
        "coordinator, checks it, and keeps it in --state",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="enrollment token; default: $FANIN_DEVICE_TOKEN; an enrolled device needs none",
    )
    parser.add_argument("--publisher", required=True, metavar="FILE", help="public key whose bundles are trusted")


def _add_telemetry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        choices=[each.value for each in LogFormat],
        default=LogFormat.TEXT.value,
        help="the log on standard error: lines of text, or a JSON object a line",
    )
    parser.add_argument(
        "--traces",
        default="",
        metavar="URL",
        help="send spans to this collector by OTLP over gRPC, or over HTTP to port 4318; default: that of the OTEL_ "
        "variables, else none",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training: when it is saved, and how long it lasts."""
    parser.add_argument(
        "--save-s",
        type=float,
        default=DEFAULT_SAVE_S,
        metavar="SECONDS",
        help="save a training that was not saved for this long, at the end of the next epoch; a killed device resumes "
        f"from there ({DEFAULT_SAVE_S:g}); inf: never",
    )
    parser.add_argument(
        "--max-steps", type=int, metavar="N", help="most train steps in a round: the update is then partial work"
    )
    parser.add_argument(
        "--max-epochs", type=float, metavar="E", help="most epochs in a round, such as 0.5: likewise partial work"
    )

    parser.add_argument(
        "--fine-tune",
        type=int,
        default=0,
        metavar="EPOCHS",
        help="with --serve: once the run has finished, train its last version for this device alone, and serve that",
    )
    parser.add_argument("--fine-tune-rate", type=float, metavar="RATE", help="its learning rate (that of the plan)")


def _add_flower(parser: argparse.ArgumentParser) -> None:
    """Add the options of a device that runs a Flower app."""
    parser.add_argument(
        "--flower",
        metavar="MODULE:APP|FOLDER",
        help="train with this Flower app, a ClientApp or NumPyClient below the working directory, or with that of the "
        "project in a folder, instead of graphs",
    )
    parser.add_argument(
        "--node-config", default="", metavar="KEY=VALUE ...", help="its node_config, as in 'num-partitions=10'"
    )
    parser.add_argument(
        "--run-config", default="", metavar="KEY=VALUE ...", help="entries that replace those of its pyproject.toml"
    )


def check_join(options: argparse.Namespace) -> None:
    """Raise InvalidInput for a value out of range, and for options that exclude each other."""
    check_remote("--server", options.server)
    if options.web is not None:
        options.web = parse_page_address("--web", options.web)
    if options.ca_fingerprint is not None:
        options.ca_fingerprint = parse_fingerprint("--ca-fingerprint", options.ca_fingerprint)
    # Raises InvalidInput for a limit out of its range.
    limit = WorkLimit(steps=options.max_steps, epochs=options.max_epochs)
    if options.fine_tune and not options.serve:
        raise InvalidInput(
            "--fine-tune: got it without --serve, expected both: the result is the model that fanin infer uses; add "
            "--serve",
            code="FN-1839",
        )
    # Raises InvalidInput for epochs or a rate out of range.
    fine_tuning_of(options)
    if options.flower and limit != WorkLimit():
        raise InvalidInput(
            "--flower: got it with --max-steps or --max-epochs, expected none of them: the app decides how long it "
            "trains; remove them",
            code="FN-0915",
        )
    if options.flower and (options.data or options.serve or options.runtime):
        raise InvalidInput(
            "--flower: got it with --data, --serve or --runtime, expected it alone: the app loads its own data, and "
            "its bundle has no graphs to serve",
            code="FN-0915",
        )
    if not options.flower and (options.node_config or options.run_config):
        raise InvalidInput(
            "--node-config, --run-config: got them without --flower, expected them for a Flower app only",
            code="FN-0914",
        )
    if not options.flower and not options.data:
        raise InvalidInput(
            "--data: got none, expected an .npz file of examples; name one, or an app with --flower", code="FN-0916"
        )
    if not 0.0 <= options.validation < 1.0:
        raise InvalidInput(
            f"--validation: got {options.validation:g}, expected a share of at least 0 and less than 1, as in 0.2",
            code="FN-1008",
        )
    if not options.save_s >= 0.0:
        raise InvalidInput(
            f"--save-s: got {options.save_s:g}, expected seconds of at least 0, or inf for never", code="FN-1008"
        )
    for option, least in (("partition", 0), ("cache_mb", 1), ("max_updates", 0), ("max_failures", 0)):
        value = getattr(options, option)
        if value is not None and value < least:
            raise InvalidInput(f"--{option.replace('_', '-')}: got {value}, expected at least {least}", code="FN-1008")
