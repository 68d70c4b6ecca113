"""Data by its address: from an S3 server and web servers that fail now and then."""

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import threading
import time

import pytest

import remote_servers
from muster.data import corpus, remote
from muster.data.remote import bucket, retry
from muster.data.remote import files as remote_files
from muster.data.remote.store import matches
from muster.errors import DataError, RecipeError
from muster.recipe.load import load
from muster.urls import refuse_secrets

BODY = os.urandom(2**20 + 12345)


@pytest.fixture(autouse=True)
def impatient(monkeypatch, tmp_path):
    """No waits between tries, and an empty cache."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture(scope="module")
def s3():
    with remote_servers.s3() as server:
        remote_servers.upload(
            server,
            "corpus",
            {
                "text/train-0.txt": b"zero",
                "text/train-10.txt": b"ten",
                "text/deep/train-1.txt": b"one",
                "text/validation.txt": b"held out",
                "text/.hidden/train-2.txt": b"not this",
                "text/readme.md": b"nor this",
                "big.txt": BODY,
            },
        )
        yield server


def texts(paths):
    return [path.read_text() for path in paths]


def test_a_folder_of_a_bucket_has_the_splits_and_the_order_of_the_same_folder_on_disk(s3, tmp_path):
    for name in ("train-0.txt", "train-10.txt", "deep/train-1.txt", "validation.txt"):
        file = tmp_path / "text" / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.touch()
    found = corpus.files("s3://corpus/text", "data.train", "train", content="text")
    here = corpus.files(str(tmp_path / "text"), "data.train", "train", content="text")
    assert [path.name for path in found] == [path.name for path in here]
    assert texts(found) == ["one", "zero", "ten"]
    held_out = corpus.sibling_split("s3://corpus/text", "validation", content="text")
    assert texts(held_out) == ["held out"]
    assert remote.url_of(held_out[0]) == "s3://corpus/text/validation.txt"


def test_globs_and_single_files_of_a_bucket(s3):
    def named(spec):
        return texts(corpus.files(spec, "data.train", "train", content="text"))

    assert named("s3://corpus/text/train-?.txt") == ["zero"]
    assert named("s3://corpus/text/**/train-*.txt") == ["one", "zero", "ten"]
    assert named("s3://corpus/text/train-0.txt") == ["zero"]


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("*.txt", "a.txt", True),
        ("*.txt", "a/b.txt", False),
        ("**/*.txt", "b.txt", True),
        ("**/*.txt", "a/c/b.txt", True),
        ("part-[0-3].txt", "part-2.txt", True),
        ("part-[!0-3].txt", "part-2.txt", False),
        ("a.txt", "abtxt", False),
    ],
)
def test_patterns_mean_what_they_mean_on_disk(pattern, name, found):
    assert matches(name, pattern) == found


def test_only_what_is_asked_for_is_copied_and_only_once(s3):
    s3.asked.clear()
    corpus.check("causal-lm", "s3://corpus/text", None, None)
    assert not any(s3.sent(f"/corpus/text/{n}.txt") for n in ("train-0", "train-10", "validation"))
    for _ in range(2):
        corpus.files("s3://corpus/text", "data.train", "train", max_files=2, content="text")
    read = [path for method, path, ranged, _ in s3.asked if method == "GET" and path.count("/") > 1]
    assert sorted(read) == ["/corpus/text/deep/train-1.txt", "/corpus/text/train-0.txt"]


def test_an_object_that_changes_gets_a_copy_of_its_own(s3):
    remote_servers.upload(s3, "changing", {"train.txt": b"before"})
    (before,) = corpus.files("s3://changing/train.txt", "data.train", "train", content="text")
    remote_servers.upload(s3, "changing", {"train.txt": b"and after"})
    (after,) = corpus.files("s3://changing/train.txt", "data.train", "train", content="text")
    assert (before.read_text(), after.read_text()) == ("before", "and after")
    assert json.loads((after.parent / ".origin.json").read_text())["bytes"] == 9


def test_an_object_that_changes_after_it_was_listed_is_noticed(s3):
    remote_servers.upload(s3, "changing", {"late.txt": b"before"})
    paths, _ = remote.find("s3://changing/late.txt", "data.train", (".txt",))
    remote_servers.upload(s3, "changing", {"late.txt": b"and after"})
    with pytest.raises(DataError, match=r"s3://changing/late.txt has 9 bytes .* changed"):
        remote.fetch(paths)


def test_an_object_of_the_same_size_that_is_written_while_it_is_read_is_noticed(s3, monkeypatch):
    monkeypatch.setattr(bucket, "PIECE", 3)
    store = remote_files.store_of("s3://changing/late.txt", "data.train")
    remote_servers.upload(s3, "changing", {"late.txt": b"before"})
    (file,), _ = store.find("s3://changing/late.txt")
    pieces = store.read(file, 0)
    assert next(pieces) == b"bef"
    second = int(file.version)
    while int(time.time()) == second:  # S3 tells seconds
        time.sleep(0.01)
    remote_servers.upload(s3, "changing", {"late.txt": b"later!"})
    with pytest.raises(DataError, match=r"s3://changing/late.txt .* changed"):
        list(pieces)


def copy_without_locks(path, file, barrier):
    fcntl.flock = refuse
    remote_files._found[path] = file
    barrier.wait()
    remote.fetch([path])


def refuse(*_):
    raise OSError(errno.ENOSYS, "no locks on this file system")


def test_processes_without_locks_do_not_write_into_one_copy():
    with remote_servers.web({"/train.txt": BODY}) as server:
        paths, _ = remote.find(f"{server.url}/train.txt", "data.train", (".txt",))
        several = multiprocessing.get_context("fork")
        barrier = several.Barrier(3)
        given = (paths[0], remote_files._found[paths[0]], barrier)
        copies = [several.Process(target=copy_without_locks, args=given) for _ in range(3)]
        for process in copies:
            process.start()
        for process in copies:
            process.join()
    assert [process.exitcode for process in copies] == [0, 0, 0]
    assert paths[0].read_bytes() == BODY


def test_a_bucket_that_fails_now_and_then_is_read_whole(s3):
    s3.faults = ["503", "drop", "503", "drop"]
    (path,) = corpus.files("s3://corpus/big.txt", "data.train", "train", content="text")
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(BODY).digest()
    assert not s3.faults


def test_several_that_want_a_file_at_the_same_time_copy_it_once(s3):
    s3.asked.clear()
    paths, _ = remote.find("s3://corpus/big.txt", "data.train", (".txt",))
    threads = [threading.Thread(target=remote.fetch, args=(paths,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert s3.sent("/corpus/big.txt") - len(BODY) in range(4096)  # the rest answers HEAD


def test_what_is_not_there_or_not_allowed_is_said_once(s3, monkeypatch):
    with pytest.raises(DataError, match=r"data\.train: s3://corpus/nowhere does not exist"):
        corpus.check("causal-lm", "s3://corpus/nowhere", None, None)
    with pytest.raises(DataError, match=r"data\.test: s3://missing-bucket/x does not exist"):
        corpus.check("causal-lm", "s3://corpus/text", None, "s3://missing-bucket/x")
    refused = OSError("AWS Error ACCESS_DENIED during HeadObject operation")
    words = r"may not be read .* credentials are read from AWS_ACCESS_KEY_ID"
    with pytest.raises(DataError, match=words):
        raise bucket.explained(refused, "s3://corpus/x", "s3")


def test_without_a_server_the_tries_end_with_a_sentence(s3, monkeypatch):
    monkeypatch.setattr(retry, "TRIES", 2)
    with remote_servers.web({}) as server:
        gone = server.url
    with pytest.raises(DataError, match=r"train\.txt: no connection .*, 2 times in a row"):
        corpus.check("causal-lm", f"{gone}/train.txt", None, None)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_web_server_that_breaks_off_is_read_on_from_the_last_byte(ranges):
    with remote_servers.web({"/train.txt": BODY}, ranges=ranges) as server:
        server.faults = ["503", "drop", "503", "drop"]
        (path,) = corpus.files(f"{server.url}/train.txt", "data.train", "train", content="text")
    assert path.read_bytes() == BODY
    if ranges:  # half, then half of the rest, then the rest; and one byte to learn its length
        starts = [ranged for _, _, ranged, size in server.asked if size]
        half, three_quarters = len(BODY) // 2, len(BODY) // 2 + (len(BODY) - len(BODY) // 2) // 2
        assert starts == ["bytes=0-0", "", f"bytes={half}-", f"bytes={three_quarters}-"]
        assert server.sent("/train.txt") == len(BODY) + 1


def test_a_copy_that_ended_midway_goes_on_in_the_next_process(monkeypatch):
    monkeypatch.setattr(retry, "TRIES", 1)
    with remote_servers.web({"/train.txt": BODY}) as server:
        server.faults = ["drop"]
        paths, _ = remote.find(f"{server.url}/train.txt", "data.train", (".txt",))
        with pytest.raises(DataError, match="what has been copied so far is kept"):
            remote.fetch(paths)
        assert not paths[0].exists(), "half of a file lies under the name of the whole"
        remote.fetch(paths)
        assert paths[0].read_bytes() == BODY
        assert server.sent("/train.txt") == len(BODY) + 1


def test_a_file_of_the_web_that_changes_between_two_ranges_is_noticed():
    files = {"/train.txt": BODY}
    with remote_servers.web(files) as server:
        paths, _ = remote.find(f"{server.url}/train.txt", "data.train", (".txt",))
        files["/train.txt"] = BODY[::-1]
        with pytest.raises(DataError, match="has changed while it was read"):
            remote.fetch(paths)


def test_what_does_not_match_the_stores_checksum_is_read_again():
    good = f"sha256:{hashlib.sha256(BODY).hexdigest()}"
    with remote_servers.web({"/train.txt": BODY}) as server:
        paths, _ = remote.find(f"{server.url}/train.txt", "data.train", (".txt",))
        file = remote_files._found[paths[0]]
        remote_files._found[paths[0]] = type(file)(**{**vars(file), "digest": good})
        partial = paths[0].with_name(f".{os.uname().nodename}.partial")
        partial.parent.mkdir(parents=True)
        partial.write_bytes(b"x" * 1000)  # of another content
        remote.fetch(paths)
    assert paths[0].read_bytes() == BODY


def test_the_login_of_netrc_is_for_its_host_alone(tmp_path):
    with remote_servers.web({"/train.txt": b"text"}) as server:
        from muster.data.remote import web

        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
        assert web._login(f"{server.url}/train.txt") == {"Authorization": "Basic bWU6c2VjcmV0"}
        assert web._login("http://localhost/train.txt") == {}


def test_a_dataset_of_the_hub_is_read_at_one_commit_with_its_checksums(monkeypatch):
    commit, content = "c0ffee" * 6 + "c0ff", {"train-0.txt": b"zero", "deep/train-1.txt": BODY}
    tree = [{"type": "directory", "path": "text/deep", "oid": "0" * 40, "size": 0}]
    files = {}
    for name, body in content.items():
        files[f"/datasets/me/corpus/resolve/{commit}/text/{name}"] = body
        blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        entry = {"type": "file", "path": f"text/{name}", "oid": blob, "size": len(body)}
        if name == "deep/train-1.txt":
            sha = hashlib.sha256(body).hexdigest()
            entry["lfs"] = {"oid": sha, "size": len(body), "pointerSize": 130}
        tree.append(entry)
    info = {"id": "me/corpus", "sha": commit, "siblings": []}
    files["/api/datasets/me/corpus"] = json.dumps(info).encode()
    files["/api/datasets/me/corpus/revision/v1"] = json.dumps(info).encode()
    files[f"/api/datasets/me/corpus/tree/{commit}"] = json.dumps(tree).encode()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with remote_servers.web(files) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        spec = "hf://datasets/me/corpus/text"
        found = corpus.files(spec, "data.train", "train", content="text")
        assert [path.read_bytes() for path in found] == [BODY, b"zero"]
        spec = "hf://datasets/me/corpus@v1/text/train-*.txt"
        assert texts(corpus.files(spec, "data.train", "train", content="text")) == ["zero"]
        with pytest.raises(DataError, match=r"data\.train: hf://datasets/me/other: .*HF_TOKEN"):
            corpus.check("causal-lm", "hf://datasets/me/other", None, None)
        server.asked.clear()
        files[f"/datasets/me/corpus/resolve/{commit}/text/train-0.txt"] = b"o\nno"
        found[1].unlink()
        monkeypatch.setattr(retry, "TRIES", 2)
        with pytest.raises(DataError, match="does not match its checksum"):
            remote.fetch(found)


@pytest.mark.parametrize(
    "spec",
    [
        "https://me:secret@example.com/x.parquet",
        "s3://AKIA:secret@bucket/x",
        "https://bucket.s3.amazonaws.com/x?X-Amz-Credential=a&X-Amz-Signature=secret",
        "https://storage.googleapis.com/b/x?GoogleAccessId=a&Signature=secret",
        "https://account.blob.core.windows.net/x?sv=1&sig=secret",
        "https://example.com/x?access_token=secret",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(spec):
    for key in ("train", "validation", "test"):
        with pytest.raises(RecipeError, match=rf"data\.{key}: .*credentials are read") as caught:
            load("gpt-micro", [f"data.{key}='{spec}'"])
        assert "secret" not in str(caught.value)


def test_a_query_without_credentials_is_part_of_an_address():
    refuse_secrets("https://example.com/x.parquet?download=true")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("s4://bucket/x", "nothing reads s4:// addresses; nearest is s3://"),
        ("file:///data/x", "a file of this machine is named by its path"),
        ("hf://gpt2", "expected hf://datasets/OWNER/NAME"),
        ("s3:///x", "names no bucket"),
        ("https://example.com/folder/", "a web server does not list its files"),
    ],
)
def test_an_address_that_nothing_reads_is_refused_before_there_is_a_run(spec, words):
    with pytest.raises(DataError, match=words):
        corpus.check("causal-lm", spec, None, None)


def test_a_pyarrow_without_s3_says_what_to_install(monkeypatch):
    import pyarrow.fs

    monkeypatch.delattr(pyarrow.fs, "S3FileSystem")
    monkeypatch.setattr(pyarrow.fs, "_not_imported", ["S3FileSystem"])  # as its own import does
    with pytest.raises(DataError, match=r"s3:// needs pyarrow with S3FileSystem.*pip install"):
        corpus.check("causal-lm", "s3://bucket/x", None, None)
