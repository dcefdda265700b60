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
import shutil
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


def download(folder):
    """The package file that apt-get downloads into `folder`, or None."""
    done = subprocess.run(["apt-get", "-q", "download", PACKAGE], cwd=folder, text=True,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    found = list(pathlib.Path(folder).glob("*.deb"))
    return found[0] if done.returncode == 0 and found else None


def update_package_lists():
    """`apt-get update` as root, as scripts/lib.sh becomes it; its failure shows in the download."""
    library = pathlib.Path(__file__).with_name("lib.sh")
    subprocess.run(["bash", "-c", '. "$1" && as_root apt-get -qq update', "bash", str(library)],
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--deb", type=pathlib.Path, help="the package file, if already downloaded")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temp:
        deb = args.deb
        if deb is None:
            deb = download(temp)
            if deb is None:
                update_package_lists()
                deb = download(temp)
            if deb is None:
                sys.exit(f"error: apt-get could not download {PACKAGE}: run 'apt-get update' as root "
                         "first, or pass the package file with --deb")
        unpack = pathlib.Path(temp, "unpacked")
        subprocess.run(["dpkg-deb", "-x", str(deb.resolve()), str(unpack)], check=True)
        rdb = next(unpack.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")).read_bytes()
    # Each split is written under another name first, so that one that is there is whole; the test
    # text comes last, for scripts/quickstart.sh looks for it.
    texts = {}
    for chunk in chunks(rdb):
        text = list(paragraphs(lines_of(chunk)))
        name = re.sub(r"[^a-z]+", "-", text[0].lower()).strip("-")
        texts.setdefault(SPLIT.get(name, "train"), {})[f"{name}.txt"] = "\n".join(text) + "\n"
    for split in ("train", "valid", "test"):
        folder = args.out / split
        half = args.out / f"{split}.tmp"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        for name, text in texts[split].items():
            (half / name).write_text(text, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        half.rename(folder)
        for path in sorted(folder.iterdir()):
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
