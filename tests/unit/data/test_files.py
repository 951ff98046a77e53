"""Rows and examples of files: every kind is read alike, and every fault is named with file, line and column."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lora_rl.data.examples import Columns, read_examples
from lora_rl.data.files import read_rows

COLUMNS = Columns("prompt", "answer")
GOOD = '{"prompt": "1+1=", "answer": "2"}\n'
ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 1, "day": datetime.date(2024, 2, 29)},
    {"prompt": "é?", "answer": "ja", "level": None, "day": None},
]
# Written by datasets 5.2.0: Dataset.from_list(...).save_to_disk(..., num_shards=2)
SAVED = Path(__file__).with_name("saved_dataset")


def write(folder: Path, text: str | bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def read(path: Path, columns: Columns = COLUMNS) -> tuple[list, list[str]]:
    warnings: list[str] = []
    return read_examples(path, columns, warnings.append), warnings


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    text = "\n" + json.dumps({"prompt": "é?", "answer": "ja", "level": 3}) + "\n\n" + GOOD.strip()
    (first, second), warnings = read(write(tmp_path, text, f"data{suffix}"))
    assert (first.content, first.answer, first.metadata) == ("é?", "ja", {"level": 3})
    assert first.where.endswith(f"data{suffix}, line 2")
    assert (second.content, second.metadata) == ("1+1=", {})
    assert warnings == []


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (example,), _ = read(write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode()))
    assert example.content == "1+1="


def test_parquet_gives_what_json_lines_give(tmp_path: Path) -> None:
    from_parquet, _ = read(write_parquet(tmp_path, ROWS))
    lines = "".join(json.dumps({k: str(v) if k == "day" else v for k, v in row.items()}) + "\n" for row in ROWS)
    from_json, _ = read(write(tmp_path, lines))
    assert [(e.id, e.content, e.answer) for e in from_parquet] == [(e.id, e.content, e.answer) for e in from_json]
    assert from_parquet[0].metadata == {"level": 1, "day": datetime.date(2024, 2, 29)}
    assert from_parquet[1].where.endswith("data.parquet, row 2")


def test_parquet_rows_are_numbered_across_batches(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "answer": "x"} for n in range(10_000)]
    examples, _ = read(write_parquet(tmp_path, rows))
    assert [e.content for e in examples] == [row["prompt"] for row in rows]
    assert examples[-1].where.endswith("row 10000")


def test_a_folder_that_save_to_disk_wrote() -> None:
    examples, _ = read(SAVED, Columns("question", "answer"))
    assert [(e.content, e.answer, e.metadata) for e in examples] == [
        (f"{n}+{n}", str(2 * n), {"level": n}) for n in range(5)
    ]
    assert examples[4].where.endswith("saved_dataset, row 5")


def test_messages_are_read_from_both_kinds(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    padded = [{**message, "name": None} for message in messages]  # as columnar files have it
    for path in (
        write(tmp_path, json.dumps({"prompt": messages, "answer": "2"})),
        write_parquet(tmp_path, [{"prompt": padded, "answer": "2"}]),
    ):
        (example,), _ = read(path)
        assert example.content == tuple(messages)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "{", r"data\.jsonl, line 2, column 2: not JSON: Expecting property name"),
        ('{"prompt": "1"\n"answer": "2"}', r"line 1, column 15: not JSON.*each line must be one whole object"),
        ("[\n", r"line 1, column 2: not JSON.*each line must be one whole object"),
        (GOOD + "[1]", r"line 2: a list; each line must be an object"),
        (GOOD.encode() + b'{"prompt": "\xff"}', r"line 2, column 13: the byte 0xff is not UTF-8; save the file as"),
        (GOOD + '\n{"prompt": "2+2="}', r"line 3: no column 'answer'; there are 'prompt'$"),
        ('{"prompt": "a", "anwser": "2"}', r"line 1: no column 'answer'; .*; did you mean 'anwser'\?"),
        ("{}", r"line 1: no column 'prompt'; there are none"),
        ('{"prompt": "", "answer": "2"}', r"line 1: prompt is ''; it must be a text that is not empty, or a list of"),
        ('{"prompt": " \\n", "answer": "2"}', r"line 1: prompt is ' \\n'; it must be"),
        ('{"prompt": 7, "answer": "2"}', r"line 1: prompt is 7; it must be"),
        ('{"prompt": null, "answer": "2"}', r"line 1: prompt is None; it must be"),
        ('{"prompt": [], "answer": "2"}', r"line 1: prompt is \[\]; it must be"),
        ('{"prompt": [{"role": "user"}], "answer": "2"}', r"line 1: message 1 of prompt is .*a role and a content"),
        ('{"prompt": ["hi"], "answer": "2"}', r"line 1: message 1 of prompt is 'hi'"),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "2"}',
            r"line 1: prompt ends with a message of the assistant",
        ),
        ('{"prompt": "1+1=", "answer": 2}', r"line 1: answer is 2; it must be a text that is not empty"),
        ('{"prompt": "1+1=", "answer": " "}', r"line 1: answer is ' '; it must be a text"),
        ('{"prompt": "1+1=", "answer": "' + "7" * 200 + '", "x": }', r"line 1, column 239: not JSON"),
        ("", r"data\.jsonl: there are no rows in it"),
        ("\n \n", r"data\.jsonl: there are no rows in it"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path, text))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": "a", "solution": "b"}],
            r"data\.parquet, row 1: no column 'answer'; there are 'prompt', 'solution'",
        ),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": None}], r"row 2: answer is None"),
        ([{"prompt": "a", "answer": 1.5}], r"row 1: answer is 1\.5; it must be a text"),
        ([{"prompt": b"a", "answer": "b"}], r"row 1: prompt is b'a'; it must be a text"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, rows: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(write_parquet(tmp_path, rows))


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), path)
    with pytest.raises(ValueError, match="there are no rows in it"):
        read(path)


def test_files_that_are_not_what_their_name_says(tmp_path: Path) -> None:
    for content in (b"", GOOD.encode() * 100):
        with pytest.raises(ValueError, match=r"data\.parquet: cannot be read as parquet: "):
            read(write(tmp_path, content, "data.parquet"))
    whole = write_parquet(tmp_path, ROWS).read_bytes()
    with pytest.raises(ValueError, match=r"cut\.parquet: cannot be read as parquet: "):
        read(write(tmp_path, whole[: len(whole) // 2], "cut.parquet"))
    with pytest.raises(ValueError, match=r"expected a file that ends in \.jsonl"):
        read(write(tmp_path, "a,b", "data.csv"))
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl: there is no such file"):
        read(tmp_path / "nothing.jsonl")


def test_folders_that_are_no_saved_dataset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a folder without state\.json"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"state\.json: not what datasets' save_to_disk writes"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    for content in (None, b"", b"garbage" * 20):
        if content is not None:
            (tmp_path / "data.arrow").write_bytes(content)
        with pytest.raises(ValueError, match=r"data\.arrow: cannot be read as arrow: "):
            list(read_rows(tmp_path))


def test_repeated_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    other = '{"prompt": "1+1=", "answer": "two"}\n'
    examples, warnings = read(write(tmp_path, GOOD + other + GOOD + '{"prompt": " 1+1= ", "answer": "2"}'))
    assert [e.answer for e in examples] == ["2", "two"]
    (warning,) = warnings
    assert warning.startswith("2 rows with the same prompt and answer")
    assert "line 3 repeats" in warning


def test_ids(tmp_path: Path) -> None:
    columns = Columns("prompt", "answer", "key")

    def line(prompt: str, key: Any) -> str:
        return json.dumps({"prompt": prompt, "answer": "x", "key": key}) + "\n"

    examples, _ = read(write(tmp_path, line("a", "first") + line("b", 7)), columns)
    assert [(e.id, e.metadata) for e in examples] == [("first", {}), ("7", {})]
    with pytest.raises(ValueError, match=r"line 2: the id '7' in 'key' is also that of .*line 1"):
        read(write(tmp_path, line("a", 7) + line("b", "7")), columns)
    for wrong in (None, True, 1.5, "", ["a"]):
        with pytest.raises(ValueError, match=r"line 1: key is .*; an id must be a text or a whole number"):
            read(write(tmp_path, line("a", wrong)), columns)
    with pytest.raises(ValueError, match=r"no column 'key'"):
        read(write(tmp_path, GOOD), columns)


def test_an_id_without_a_column_does_not_depend_on_the_line(tmp_path: Path) -> None:
    (first,), _ = read(write(tmp_path, GOOD))
    examples, _ = read(write(tmp_path, '{"prompt": "z", "answer": "y"}\n' + GOOD))
    assert examples[1].id == first.id
    assert examples[0].id != first.id


def test_the_shipped_file_holds_sums() -> None:
    path = Path(__file__).parents[3] / "examples/data/sums.jsonl"
    examples, warnings = read(path, Columns("question", "answer"))
    assert len(examples) == 600 and warnings == []
    for example in examples:
        a, b = map(int, example.content.split("+"))
        assert min(a, b) >= 10 and max(a, b) <= 99 and example.answer == str(a + b)
