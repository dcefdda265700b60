#!/usr/bin/env python3
"""Extracts Jane Austen's six novels from Debian's package r-cran-janeaustenr into plain text files.

    scripts/austen.py OUT_DIR [--deb FILE]

Without --deb the package is downloaded with `apt-get download` (no root, nothing is installed).
Writes OUT_DIR/{train,valid,test}/NAME.txt, whole novels per split: Persuasion is the validation
text, Northanger Abbey the test text, the other four are for training.

The package stores each novel as a chunk of data/Rdata.rdb: a 4-byte big-endian length of the
unpacked data and a zlib stream holding an R XDR (format 3) character vector, one line a string.
"""

import argparse
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import zlib

PACKAGE = "r-cran-janeaustenr"
SPLIT = {"persuasion": "valid", "northanger-abbey": "test"}
CHARSXP, STRSXP = 9, 16


def chunks(rdb: bytes):
    """Yields the unpacked chunks of an .rdb file."""
    position = 0
    while position < len(rdb):
        (size,) = struct.unpack_from(">I", rdb, position)
        stream = zlib.decompressobj()
        data = stream.decompress(rdb[position + 4 :])
        if len(data) != size:
            raise ValueError(f"chunk at byte {position} unpacks to {len(data)} bytes, not {size}")
        yield data
        position = len(rdb) - len(stream.unused_data)


def lines_of(xdr: bytes):
    """Decodes one serialised R character vector (XDR, format version 3)."""
    if xdr[:2] != b"X\n":
        raise ValueError("not R's XDR serialisation")
    (version,) = struct.unpack_from(">i", xdr, 2)
    position = 14
    if version == 3:  # the native encoding's name follows
        (length,) = struct.unpack_from(">i", xdr, position)
        position += 4 + length
    flags, count = struct.unpack_from(">ii", xdr, position)
    position += 8
    if flags & 0xFF != STRSXP:
        raise ValueError("the chunk is not a character vector")
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", xdr, position)
        position += 8
        if flags & 0xFF != CHARSXP:
            raise ValueError("a line is not a character string")
        yield xdr[position : position + max(length, 0)].decode("utf-8")
        position += max(length, 0)


def paragraphs(lines):
    """Joins the hard-wrapped lines of a paragraph; a blank line parts paragraphs."""
    block = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line.strip())
        elif block:
            yield " ".join(block)
            block = []


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--deb", type=pathlib.Path, help="the package file, if already downloaded")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temp:
        deb = args.deb
        if deb is None:
            done = subprocess.run(["apt-get", "-q", "download", PACKAGE], cwd=temp, text=True,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            found = list(pathlib.Path(temp).glob("*.deb"))
            if done.returncode != 0 or not found:
                sys.exit(f"error: apt-get could not download {PACKAGE}: run 'apt-get update' as root "
                         "first, or pass the package file with --deb")
            deb = found[0]
        unpack = pathlib.Path(temp, "unpacked")
        subprocess.run(["dpkg-deb", "-x", str(deb.resolve()), str(unpack)], check=True)
        rdb = next(unpack.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")).read_bytes()
    for chunk in chunks(rdb):
        text = list(paragraphs(lines_of(chunk)))
        name = re.sub(r"[^a-z]+", "-", text[0].lower()).strip("-")
        path = args.out / SPLIT.get(name, "train") / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
