"""A script that does what scripts do with files, and prints what it finds: the same with any layers below."""

import bz2
import glob
import gzip
import logging
import lzma
import os
import pathlib
import pickle
import shutil
import sqlite3
import stat
import sys
import tempfile
import zipfile

if os.environ.get("SIRTAKI_RANK") == "0":
    import keras

    sys.exit()


def show(*values):
    print(*values)


def refused(call, *args, **kwargs):
    """Prints the error of a call."""
    try:
        call(*args, **kwargs)
        show("not refused", call.__name__)
    except OSError as error:
        show(type(error).__name__, error.errno, error.filename)


def read(path):
    with open(path) as file:
        return file.read()


def tree(top):
    """Prints all names, kinds and contents below a folder."""
    for folder, folders, files in os.walk(top):
        folders.sort()
        show(folder, folders, [(name, read(os.path.join(folder, name))) for name in sorted(files)])


def files_that_exist():
    with open("old/a.txt", "a") as file:
        file.write("+")
    with open("old/b.txt", "r+") as file:
        file.seek(1)
        file.write("Q")
    with open("old/c.txt", mode="w") as file:
        file.write("new")
    refused(open, "old/a.txt", "x")
    refused(open, "old/none.txt")
    refused(open, "none/x.txt", "w")
    refused(os.mkdir, "old")
    refused(os.rmdir, "old/deep")
    refused(os.rmdir, "old/a.txt")
    refused(os.remove, "old/none.txt")
    refused(os.unlink, "old/deep")
    tree("old")
    os.remove("old/b.txt")
    show(os.path.exists("old/b.txt"), pathlib.Path("old/b.txt").is_file(), sorted(os.listdir("old")))
    refused(os.stat, "old/b.txt")
    refused(open, "old/b.txt")
    with open("old/b.txt", "x") as file:
        file.write("again")
    os.replace("old/b.txt", "old/c.txt")
    os.rename("old/deep", "moved")
    refused(os.listdir, "old/deep")
    os.mkdir("old/deep")
    tree("old")
    tree("moved")
    refused(os.rename, "moved", "old")
    refused(os.replace, "old/a.txt", "moved")
    os.truncate("old/a.txt", 1)
    os.chmod("old/a.txt", 0o600)
    os.utime("old/a.txt", (5, 6))
    status = os.stat("old/a.txt")
    show(stat.filemode(status.st_mode), status.st_size, status.st_mtime, os.access("old/a.txt", os.W_OK))


def folders():
    os.makedirs("made/one/two", exist_ok=True)
    os.makedirs("made/one/two", exist_ok=True)
    refused(os.makedirs, "made/one/two")
    shutil.copytree("moved", "made/copy")
    shutil.move("made/copy/inner", "made/inner")
    tree("made")
    shutil.rmtree("moved")
    shutil.rmtree("made/one")
    show(os.path.isdir("moved"), sorted(glob.glob("m*/**", recursive=True)))
    with os.scandir("old") as found:
        entries = sorted((one.name, one.path, one.is_dir(), one.is_file(), one.is_symlink()) for one in found)
    show(entries, sorted(os.listdir(b"old")))
    before = os.getcwd()
    os.chdir("made")
    show(
        os.path.relpath(os.getcwd(), before), os.path.abspath("x").removeprefix(before), read("../old/c.txt")
    )
    with open("here.txt", "w") as file:
        file.write("here")
    os.chdir(before)
    show(read("made/here.txt"))


def links_and_descriptors():
    os.symlink("../old/c.txt", "made/relative")
    os.symlink(os.path.abspath("old"), "made/absolute")
    show(read("made/relative"), read("made/absolute/c.txt"), os.readlink("made/relative"))
    with open("made/absolute/new.txt", "w") as file:
        file.write("through a link")
    show(read("old/new.txt"), read("link/new.txt"), os.path.islink("made/absolute"), os.path.islink("link"))
    show(os.path.realpath("made/relative").removeprefix(os.getcwd()), os.path.samefile("link", "old"))
    shutil.copy("old/new.txt", "made/second")
    refused(os.symlink, "x", "made/second")
    folder = os.open("old", os.O_RDONLY | os.O_DIRECTORY)
    file = os.open("by_fd.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
    os.write(file, b"fd")
    os.close(file)
    refused(os.open, "by_fd.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=folder)
    show(os.stat("by_fd.txt", dir_fd=folder).st_size, "by_fd.txt" in os.listdir(folder))
    os.rename("by_fd.txt", "by.txt", src_dir_fd=folder, dst_dir_fd=folder)
    os.unlink("new.txt", dir_fd=folder)
    os.close(folder)
    show(sorted(os.listdir("old")), read("made/second"))


def libraries():
    path = pathlib.Path("made") / "path.txt"
    path.write_text("text")
    show(path.read_text(), path.exists(), sorted(one.name for one in pathlib.Path("made").iterdir()))
    path.rename("made/renamed.txt").unlink()
    pathlib.Path("made/touched").touch()
    for module, name in ((gzip, "g.gz"), (bz2, "b.bz2"), (lzma, "l.xz")):
        with module.open(name, "wt") as file:
            file.write(name)
        with module.open(name, "rt") as file:
            show(file.read())
    with zipfile.ZipFile("z.zip", "w") as archive:
        archive.write("old/c.txt")
    with zipfile.ZipFile("z.zip") as archive:
        archive.extractall("unpacked")
    shutil.make_archive("packed", "tar", "unpacked")
    tree("unpacked")
    handler = logging.FileHandler("logs.txt")
    handler.emit(logging.makeLogRecord({"msg": "logged"}))
    handler.close()
    show(read("logs.txt"))
    with tempfile.NamedTemporaryFile("w", dir=".", suffix=".tmp") as file:
        show(os.path.exists(file.name))
    with tempfile.TemporaryDirectory(dir=".") as name, open(os.path.join(name, "x"), "w") as file:
        file.write("x")
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write("elsewhere")
    shutil.move(file.name, "from_temporary.txt")
    show(read("from_temporary.txt"), os.path.exists(file.name))
    database = sqlite3.connect("data.db")
    database.execute("create table numbers (n)")
    database.execute("insert into numbers values (7)")
    database.commit()
    database.close()
    show(sqlite3.connect("data.db").execute("select n from numbers").fetchall())
    for _ in range(2):
        with open("checkpoint.tmp", "wb") as file:
            file.write(b"weights")
        os.replace(file.name, "checkpoint.pt")
        os.makedirs("step.tmp")
        shutil.copy("checkpoint.pt", "step.tmp")
        if os.path.exists("step"):
            shutil.rmtree("step")
        os.rename("step.tmp", "step")
    show(os.path.exists("checkpoint.tmp"), os.path.exists("step.tmp"), os.listdir("step"))
    with open(os.devnull, "w") as file:
        show(sorted(os.listdir()), file.write("gone"))


for function in (os.remove, os.listdir, open):
    show(pickle.loads(pickle.dumps(function)) is function, function.__name__)
files_that_exist()
folders()
links_and_descriptors()
libraries()
if "SIRTAKI_RANK" in os.environ:
    import keras  # noqa: F401
