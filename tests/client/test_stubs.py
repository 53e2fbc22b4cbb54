"""Stubs for other languages, generated as docs/clients.md says; compiled where it can be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_frontend import DRAWN_SEED, Break, FakeFrontend, piece, token
from tools.launch import ROOT

PROTOS = ROOT / "protos"
GO_CLIENT = ROOT / "client/go"
NODE_MODULES = ROOT / "client/node/node_modules"
PROTOC = f"{sys.executable} -m grpc_tools.protoc"
FILES = [
    f"pagewire/v1/{name}.proto"
    for name in (
        *("inference_service", "adapter", "columns", "model", "pooling", "sampling", "status"),
        "validation",
    )
]

DEBIAN_GO = Path("/usr/share/gocode")
"""Where Debian's packages put their sources: golang-google-grpc-dev, golang-google-protobuf-dev."""


def run(*command: str | Path, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=dict(os.environ) | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_python_stubs_stand_alone(tmp_path: Path) -> None:
    flags = ["-I.", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    run(*PROTOC.split(), *flags, *FILES, cwd=PROTOS)
    for package in ("pagewire", "pagewire/v1"):
        (tmp_path / package / "__init__.py").touch()  # or those of this checkout are found first
    program = (
        "from pagewire.v1 import inference_service_pb2 as pb, inference_service_pb2_grpc as rpc\n"
        "import pagewire.v1.model_pb2 as model\n"
        f"assert model.__file__.startswith({str(tmp_path)!r})\n"
        "print(pb.GenerateRequest(text='Hello').text, rpc.InferenceServiceStub.__name__)\n"
    )
    done = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout == "Hello InferenceServiceStub\n"


def test_typescript_types_compile(tmp_path: Path) -> None:
    assert NODE_MODULES.is_dir(), "run `npm ci` in client/node first"
    generate = NODE_MODULES / ".bin/proto-loader-gen-types"
    flags = ["--longs=String", "--enums=String", "--defaults", "--oneofs"]
    where = ["--grpcLib=@grpc/grpc-js", f"--includeDirs={PROTOS}", f"--outDir={tmp_path}"]
    run(generate, *flags, *where, FILES[0], cwd=tmp_path)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    compiler = NODE_MODULES / ".bin/tsc"
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "commonjs"]
    run(compiler, *options, "--target", "es2022", "pagewire/v1/InferenceService.ts", cwd=tmp_path)


@pytest.mark.parametrize(
    ("language", "file"),
    [("java", "pagewire/v1/InferenceServiceOuterClass.java"), ("cpp", "pagewire/v1/sampling.pb.h")],
)
def test_messages_in_other_languages_by_buf(tmp_path: Path, language: str, file: str) -> None:
    if shutil.which("protoc") is None:
        pytest.skip("needs protoc: that of grpcio-tools speaks Python alone")
    template = f"version: v2\nplugins: [{{protoc_builtin: {language}, out: {tmp_path}}}]\n"
    (tmp_path / "buf.gen.yaml").write_text(template)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run("buf", "generate", "--template", tmp_path / "buf.gen.yaml", cwd=PROTOS, PATH=path)
    assert any(found.is_file() for found in tmp_path.rglob(Path(file).name))


DEBIAN_CODEC = """\
package main

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(message interface{}) ([]byte, error) {
	return proto.Marshal(message.(proto.Message))
}

func (codec) Unmarshal(data []byte, message interface{}) error {
	return proto.Unmarshal(data, message.(proto.Message))
}

func init() { encoding.RegisterCodec(codec{}) }
"""
"""Debian 12's gRPC is older than its protobuf, and does not know how to write today's messages."""


@pytest.fixture(scope="module")
def go_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Go example as a program."""
    if not all(map(shutil.which, ("go", "protoc-gen-go", "protoc-gen-go-grpc"))):
        pytest.skip("needs Go, protoc-gen-go and protoc-gen-go-grpc")
    for name in ("grpc", "protobuf"):  # the former does not depend on the latter
        if not (DEBIAN_GO / "src/google.golang.org" / name).is_dir():
            pytest.skip(f"needs golang-google-{name}-dev, as modules cannot be fetched in a test")
    workspace = tmp_path_factory.mktemp("go")
    folder = workspace / "src/pagewire/client"
    shutil.copytree(GO_CLIENT, folder)
    (folder / "codec.go").write_text(DEBIAN_CODEC)
    run("./generate.sh", cwd=folder, PROTOC=PROTOC, PROTOS=str(PROTOS))
    program = workspace / "pagewire-go"
    settings = {"GO111MODULE": "off", "GOPATH": f"{workspace}:{DEBIAN_GO}"}
    run("go", "vet", ".", cwd=folder, **settings)
    run("go", "build", "-o", program, ".", cwd=folder, **settings)
    return program


def test_the_go_example_streams_an_answer(frontend: FakeFrontend, go_client: Path) -> None:
    flags = ["-address", frontend.address, "-max-tokens", "5", "-temperature", "0"]
    done = run(go_client, *flags, "Hello", cwd=go_client.parent)
    assert frontend.requests[0].sampling_params.max_tokens == 5
    assert frontend.requests[0].sampling_params.HasField("temperature")
    tokens = [token("Hello", DRAWN_SEED, 0, position) for position in range(5)]
    assert done.stdout == "".join(map(piece, tokens)) + "\n"


def test_the_go_example_takes_no_cut_stream_for_a_whole_one(
    frontend: FakeFrontend, go_client: Path
) -> None:
    frontend.breaks.append(Break(after_tokens=2, failure=None))
    done = subprocess.run(
        [go_client, "-address", frontend.address, "Hello"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == "error: the stream ended before the answer was complete\n"
