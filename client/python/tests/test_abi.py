# SPDX-License-Identifier: Apache-2.0
"""The binding is what the headers say: structs by a C compiler, prototypes, constants and error codes by the text."""

import ctypes
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from oscar_kv import _abi, errors, model, tensors

ROOT = Path(__file__).resolve().parents[3]
HEADERS = [ROOT / "client/include", ROOT / "proto/include"]
HEADER = (HEADERS[0] / "oscar/oscar.h").read_text()
GEOMETRY_HEADER = (HEADERS[1] / "oscar/geometry.h").read_text()
ERROR_HEADER = (HEADERS[1] / "oscar/error.h").read_text()

VALUES = {
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "void": None,
}


def without_comments(text):
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def prototypes():
    """Name, result and arguments of each declaration; any pointer is "pointer"."""
    text = without_comments(HEADER) + re.sub(
        r"^const char \*oscar", "OSCAR_API const char *oscar", without_comments(ERROR_HEADER), flags=re.M
    )
    for result, name, arguments in re.findall(r"OSCAR_API\s+([\w\s*]+?)(oscar_\w+)\(((?:[^()]|\([^()]*\))*)\);", text):
        parsed = []
        for argument in re.split(r",(?![^(]*\))", arguments):
            argument = argument.strip()
            if argument == "void":
                continue
            is_pointer = "*" in argument or "[" in argument
            parsed.append("pointer" if is_pointer else VALUES[argument.split()[0]])
        yield name, "pointer" if "*" in result else VALUES[result.strip()], parsed


def is_pointer(kind):
    return kind in (ctypes.c_char_p, ctypes.c_void_p) or (
        isinstance(kind, type) and issubclass(kind, (ctypes._Pointer, ctypes._CFuncPtr))
    )


class Abi(unittest.TestCase):
    def test_structs_are_laid_out_as_a_c_compiler_does(self):
        compiler = shutil.which("cc") or shutil.which("gcc")
        self.assertIsNotNone(compiler, "no C compiler")
        lines = ["#include <oscar/oscar.h>", "#include <stdio.h>", "int main(void) {"]
        expected = {}
        for name, struct in _abi.STRUCTS.items():
            expected[name] = (0, ctypes.sizeof(struct))
            lines.append(f'printf("{name} 0 %zu\\n", sizeof(struct {name}));')
            for field, _ in struct._fields_:
                place = getattr(struct, field)
                expected[f"{name}.{field}"] = (place.offset, place.size)
                lines.append(
                    f'printf("{name}.{field} %zu %zu\\n", offsetof(struct {name}, {field}), '
                    f"sizeof(((struct {name} *)0)->{field}));"
                )
        lines.append("}")
        with tempfile.TemporaryDirectory() as folder:
            source, program = Path(folder, "layout.c"), Path(folder, "layout")
            source.write_text("\n".join(lines))
            subprocess.run([compiler, *(f"-I{path}" for path in HEADERS), "-o", program, source], check=True)
            printed = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout
        found = {name: (int(offset), int(size)) for name, offset, size in map(str.split, printed.splitlines())}
        self.assertEqual(found, expected)

    def test_every_struct_of_the_header_is_there(self):
        declared = re.findall(r"^struct (oscar_\w+) \{", HEADER + GEOMETRY_HEADER, flags=re.M)
        self.assertEqual(sorted(declared), sorted(_abi.STRUCTS))
        for name in declared:
            body = re.search(
                rf"^struct {name} \{{(.*?)^\}}", without_comments(HEADER + GEOMETRY_HEADER), flags=re.M | re.S
            )[1]
            fields = re.findall(r"(\w+)(?:\[\w+\])?\s*[,;]", body)
            self.assertEqual(fields, [field for field, _ in _abi.STRUCTS[name]._fields_], name)

    def test_every_function_has_the_prototype_of_the_header(self):
        found = {name: (result, arguments) for name, result, arguments in prototypes()}
        exported = re.findall(r"^    (oscar_\w+);", (ROOT / "client/liboscar.map").read_text(), flags=re.M)
        self.assertEqual(sorted(found), sorted(exported))
        bound = {
            name: tuple(
                ["pointer" if is_pointer(kind) else kind for kind in part]
                if isinstance(part, list)
                else ("pointer" if is_pointer(part) else part)
                for part in (result, arguments)
            )
            for name, (result, *arguments) in _abi.FUNCTIONS.items()
        }
        self.assertEqual(found, bound)

    def test_constants(self):
        for name, value in re.findall(
            r"#define (OSCAR_\w+_TOKENS) \(?(\d+U(?: << \d+)?)\)?$", GEOMETRY_HEADER, flags=re.M
        ):
            base, _, shift = value.replace("U", "").partition(" << ")
            self.assertEqual(getattr(model, name.removeprefix("OSCAR_")), int(base) << int(shift or 0), name)
        self.assertEqual(
            (tensors.BF16, tensors.FP16),
            tuple(int(value) for value in re.findall(r"OSCAR_[BF][FP]16 = (\d)", GEOMETRY_HEADER)),
        )
        self.assertEqual(ctypes.sizeof(_abi.Secret), int(re.search(r"OSCAR_LEASE_SECRET (\d+)", HEADER)[1]))

    def test_error_codes(self):
        table = {name: int(value) for name, value in re.findall(r"X\((\w+), (-\d+),", ERROR_HEADER)}
        self.assertEqual(table, {code.name: code.value for code in errors.ErrorCode})


if __name__ == "__main__":
    unittest.main()
