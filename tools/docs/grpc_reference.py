"""The page of services, messages and fields, generated from the protos and their comments."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

PROTOS = Path(__file__).parents[2] / "protos"
ORDER = ("inference_service", "sampling", "model", "status", "scheduler_service", "worker_service")
"""Files in reading order; others follow."""

HEAD = """\
# gRPC reference

The package `pagewire.v1`, from the comments in `protos/pagewire/v1`. Clients need
`inference_service.proto` and its imports; the other files are internal to Pagewire's services.
Every service has reflection and `grpc.health.v1.Health`. [Clients](../clients.md) explains how to
call it, [Writing a worker](../writing-a-worker.md) how to implement `WorkerService`.
"""

_PACKAGE = ".pagewire.v1."
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6  # fields of FileDescriptorProto, as paths of comments name them
_FIELD, _NESTED, _NESTED_ENUM = 2, 3, 4  # of DescriptorProto
_VALUE = _METHOD = 2  # of EnumDescriptorProto, of ServiceDescriptorProto
_SYNTAX = 12

Comments = dict[tuple[int, ...], str]


def render() -> str:
    """The page as Markdown. Raises RuntimeError if protoc refuses the protos."""
    return HEAD + "".join("\n" + part for file in _files() for part in _file(file))


def _files() -> list[FileDescriptorProto]:
    names = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.glob("pagewire/v1/*"))
    names = [name for name in names if name.endswith(".proto")]
    with tempfile.NamedTemporaryFile() as out:
        # grpcio-tools bundles google/protobuf/*.proto.
        paths = [f"-I{PROTOS}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
        flags = ["--include_source_info", f"--descriptor_set_out={out.name}"]
        if protoc.main(["protoc", *paths, *flags, *names]):
            raise RuntimeError("protoc failed")
        found = FileDescriptorSet.FromString(Path(out.name).read_bytes())
    return sorted(found.file, key=lambda file: _place(Path(file.name).stem))


def _place(stem: str) -> int:
    return ORDER.index(stem) if stem in ORDER else len(ORDER)


def _file(file: FileDescriptorProto) -> Iterator[str]:
    located = file.source_code_info.location
    comments = {tuple(location.path): _text(location.leading_comments) for location in located}
    about = [
        _text(location)
        for at in located
        if list(at.path) == [_SYNTAX]
        for location in (*at.leading_detached_comments, at.leading_comments)
    ]
    yield f"## {Path(file.name).name}\n\n" + "\n\n".join(filter(None, about)) + "\n"
    for index, service in enumerate(file.service):
        yield from _service(service, comments, (_SERVICE, index))
    for index, message in enumerate(file.message_type):
        yield from _message(message, message.name, comments, (_MESSAGE, index))
    for index, enum in enumerate(file.enum_type):
        yield _enum(enum, enum.name, comments, (_ENUM, index))


def _service(
    service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    yield f"### {service.name}\n\n{comments.get(path, '')}\n"
    for index, method in enumerate(service.method):
        asked = "stream " * method.client_streaming + _link(method.input_type)
        answered = "stream " * method.server_streaming + _link(method.output_type)
        about = comments.get((*path, _METHOD, index), "")
        yield f"#### {service.name}.{method.name}\n\n{asked} → {answered}\n\n{about}\n"


def _message(
    message: DescriptorProto, name: str, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    rows = [
        _row(field.name, str(field.number), _type(field, message), comments, (*path, _FIELD, index))
        for index, field in enumerate(message.field)
    ]
    yield f"### {name}\n\n{comments.get(path, '')}\n\n" + _table("field", rows)
    for index, nested in enumerate(message.nested_type):
        yield from _message(nested, f"{name}.{nested.name}", comments, (*path, _NESTED, index))
    for index, enum in enumerate(message.enum_type):
        yield _enum(enum, f"{name}.{enum.name}", comments, (*path, _NESTED_ENUM, index))


def _enum(enum: EnumDescriptorProto, name: str, comments: Comments, path: tuple[int, ...]) -> str:
    rows = [
        _row(value.name, str(value.number), "", comments, (*path, _VALUE, index))
        for index, value in enumerate(enum.value)
    ]
    return f"### {name}\n\n{comments.get(path, '')}\n\n" + _table("value", rows)


def _table(what: str, rows: Sequence[str]) -> str:
    head = f"| {what} | number | type | meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(rows) if rows else ""


def _row(name: str, number: str, kind: str, comments: Comments, path: tuple[int, ...]) -> str:
    about = comments.get(path, "").replace("\n", " ").replace("|", "\\|")
    return f"| `{name}` | {number} | {kind} | {about} |\n"


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    if field.type in (field.TYPE_MESSAGE, field.TYPE_ENUM):
        kind = _link(field.type_name)
    else:
        kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == field.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of {message.oneof_decl[field.oneof_index].name}"
    return kind


def _link(type_name: str) -> str:
    """A link to one of our messages or enums, by the anchor of its heading."""
    name = type_name.removeprefix(_PACKAGE)
    if name == type_name:
        return f"`{type_name.removeprefix('.')}`"
    return f"[{name}](#{name.replace('.', '').lower()})"


def _text(comment: str) -> str:
    """A comment as a paragraph, with `<` escaped because it would begin HTML."""
    lines = (line.strip() for line in comment.strip().splitlines())
    return "\n".join(lines).replace("<", "&lt;")
