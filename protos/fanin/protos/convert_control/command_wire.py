"""Wire form of commands."""

from typing import assert_never

from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.messages import MAX_NUMBER, Adopt, Command, Pause, Resume, Stop
from fanin.v1 import control_pb2 as pb


def command_to_proto(command: Command) -> pb.CommandRequest:
    message = pb.CommandRequest(command_id=command.command_id, run_id=command.run_id)
    match command.what:
        case Pause():
            message.pause.SetInParent()
        case Resume() as resume:
            message.resume.CopyFrom(pb.ResumeRun(rounds=resume.rounds))
        case Stop():
            message.stop.SetInParent()
        case Adopt() as adopt:
            version = pb.AdoptVersion(from_run_id=adopt.from_run_id, number=adopt.number, rounds=adopt.rounds)
            message.adopt.CopyFrom(version)
        case other:
            assert_never(other)
    return message


def command_from_proto(message: pb.CommandRequest) -> Command:
    return Command(command_id=message.command_id, run_id=message.run_id, what=_what(message))


def _what(message: pb.CommandRequest) -> Pause | Resume | Stop | Adopt:
    match message.WhichOneof("what"):
        case "pause":
            return Pause()
        case "resume":
            return Resume(rounds=message.resume.rounds)
        case "stop":
            return Stop()
        case "adopt":
            adopt = message.adopt
            if adopt.number > MAX_NUMBER:
                raise NotFound(f"run {(adopt.from_run_id or message.run_id)[:64]!r}: has no version {adopt.number}")
            return Adopt(from_run_id=adopt.from_run_id, number=adopt.number, rounds=adopt.rounds)
        case other:
            raise InvalidInput(f"command: got {other}, expected one that this fanin knows; install a newer one")
