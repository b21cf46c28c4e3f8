"""Adds what is generated from the .proto files, two folders up, to the package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PROTOCOL = Path(__file__).resolve().parent.parent


class Generate(build_py):
    def run(self):
        super().run()
        import grpc_tools
        from grpc_tools import protoc

        google = Path(grpc_tools.__file__).parent / "_proto"
        files = sorted(str(p) for p in PROTOCOL.glob("kvscout/scheduler/v1/*.proto"))
        out = self.build_lib
        code = protoc.main(
            ["protoc", f"-I{PROTOCOL}", f"-I{google}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", *files]
        )
        if code or not files:
            raise RuntimeError(f"protoc: {code}, {len(files)} files in {PROTOCOL}")


setup(cmdclass={"build_py": Generate})
