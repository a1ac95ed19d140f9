"""Writes stubs of the CUDA libraries, so that a CUDA build of torch can be imported on a machine without them.

The dynamic linker loads torch only if every library that it was linked with exists, and if every symbol and symbol
version that it uses is defined. One library defines all symbols; each function returns 100, `cudaErrorNoDevice`, so
torch finds no GPU. A library under each CUDA name links to it and defines the versions, without symbols.

Run by the Python whose torch it is for. Needs `gcc` and `readelf`.
"""

import pathlib
import re
import subprocess
import sysconfig
import tempfile

# The driver, libcuda.so.1, must not be stubbed: torch opens it to see if there is one.
CUDA_LIBRARY = re.compile(r"lib(cudart|cudnn|cu(bla|ff|fi|pt|ra|so|sp)|nvrtc|nvshmem|nccl|nvJitLink|nvToolsExt)")
CUDA_SYMBOL = re.compile(r"_*(cuda|cu[A-Z]|cu(blas|dnn|fft|file|pti|rand|sparse|solver)|File|nccl|nvrtc|nvshmem|nvtx)")
# These return text.
TEXT_FUNCTION = re.compile(r"\w+(GetErrorString|GetErrorName|GetLastError|StatusString|StatusName)$")
ALL = "libcudastub.so"


def readelf(option, file):
    return subprocess.run(["readelf", option, "-W", file], check=True, capture_output=True, text=True).stdout


def needed_libraries(file):
    names = re.findall(r"\(NEEDED\).*\[(.+?)\]", readelf("--dynamic", file))
    return {name for name in names if CUDA_LIBRARY.match(name)}


def needed_versions(file):
    """The symbol versions that a library needs, as pairs of library and version."""
    library = None
    for line in readelf("--version-info", file).splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif library and (found := re.search(r"Name: (\S+)\s+Flags:", line)):
            yield library, found[1]


def dynamic_symbols(file):
    """The dynamic symbols of a library: name, kind, and whether it defines them."""
    for line in readelf("--dyn-syms", file).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            yield fields[7].partition("@")[0], fields[3], fields[6] != "UND"


def build(folder, name, source, *options):
    with tempfile.TemporaryDirectory() as temporary:
        file = pathlib.Path(temporary, "stub.c")
        file.write_text(source)
        flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
        subprocess.run(["gcc", *flags, "-o", folder / name, file, *options], check=True)


def stub(symbol, kind):
    if kind == "OBJECT":
        return f"char {symbol}[65536];"
    if TEXT_FUNCTION.match(symbol):
        return f'const char *{symbol}(void) {{ return "no CUDA"; }}'
    return f"long {symbol}(void) {{ return 100; }}"


def write_stubs(folder):
    libraries, versions, used, defined = set(), {}, {}, set()
    for file in sorted(folder.glob("*.so*")):
        needed = needed_libraries(file)
        libraries |= needed
        for library, version in needed_versions(file):
            versions.setdefault(library, set()).add(version)
        for name, kind, is_defined in dynamic_symbols(file):
            if is_defined:
                defined.add(name)
            elif needed and CUDA_SYMBOL.match(name):
                used[name] = kind
    libraries = sorted(name for name in libraries if not (folder / name).exists())
    missing = {name: kind for name, kind in used.items() if name not in defined}
    if not libraries:
        return
    build(folder, ALL, "\n".join(stub(*symbol) for symbol in sorted(missing.items())))
    for name in libraries:
        with tempfile.NamedTemporaryFile("w", suffix=".map") as script:
            # Each version has a symbol of its own: a version without any is not written into the library.
            names = {version: re.sub(r"\W", "_", f"stub_{name}_{version}") for version in versions.get(name, ())}
            script.write("".join(f"{version} {{ global: {symbol}; }};\n" for version, symbol in names.items()))
            script.flush()
            source = "\n".join(f"void {symbol}(void) {{}}" for symbol in names.values())
            versioned = [f"-Wl,--version-script={script.name}"] if names else []
            link = ["-Wl,--no-as-needed", f"-L{folder}", f"-l:{ALL}", "-Wl,-rpath,$ORIGIN"]
            build(folder, name, source, *versioned, *link)
    print(f"{len(libraries)} CUDA libraries stubbed, {len(missing)} symbols")


if __name__ == "__main__":
    write_stubs(pathlib.Path(sysconfig.get_paths()["purelib"], "torch", "lib"))
