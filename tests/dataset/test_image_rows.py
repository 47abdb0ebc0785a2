"""Rows with images: shown where they are marked, counted without their patches, made patches of in a batch."""

import datasets
import pytest
import torch
from testing_images import picture, write_model

from arealite.dataset import get_custom_dataset
from arealite.dataset.loader import PromptLoader, sft_batches
from arealite.dataset.prepare import show
from arealite.dataset.rows import Rows
from arealite.utils.hf import load_hf_tokenizer, load_image_processor
from arealite.utils.images import process_images
from arealite.utils.token_ids import image_token_id

IMAGE = {"type": "image"}
COLUMNS = {"prompt_key": "problem", "image_key": "images"}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def tools(path: str) -> dict[str, object]:
    return {"tokenizer": load_hf_tokenizer(path), "processor": load_image_processor(path)}


@pytest.fixture(scope="module")
def clevr(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set in the shape of the hub's, as `huggingface-cli download` leaves it."""
    folder = tmp_path_factory.mktemp("data") / "clevr_count_70k"
    (folder / "data").mkdir(parents=True)
    for split, sizes in (("train", ["wide", "small", "tall"]), ("test", ["small", "small"])):
        rows = {
            "images": [[picture(size, seed)] for seed, size in enumerate(sizes)],
            "problem": ["<image>How many?"] * len(sizes),
            "answer": [str(3 + seed) for seed in range(len(sizes))],
        }
        columns = datasets.Features(
            images=datasets.List(datasets.Image()), problem=datasets.Value("string"), answer=datasets.Value("string")
        )
        datasets.Dataset.from_dict(rows, columns).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return f"{folder}/"


def test_images_are_shown_where_they_are_marked(clevr: str, tools: dict[str, object]) -> None:
    rows = get_custom_dataset(clevr, type="rl", system_prompt="Count.", **COLUMNS, **tools)
    assert [row["answer"] for row in rows] == ["3", "4", "5"]
    system, user = rows[0]["messages"]
    assert system == {"role": "system", "content": "Count."}
    assert user == {"role": "user", "content": [IMAGE, text("How many?")]}
    assert rows[1]["images"][0]["bytes"].startswith(b"\x89PNG"), "images stay encoded until they are needed"


def test_the_length_of_a_prompt_counts_its_images(clevr: str, tools: dict[str, object]) -> None:
    lengths = []
    for row in get_custom_dataset(clevr, type="sft", **COLUMNS, **tools):
        assert row["input_ids"].count(image_token_id(tools["tokenizer"])) == {3: 8, 4: 4, 5: 6}[3 + len(lengths)]
        lengths.append(len(row["input_ids"]) - sum(row["loss_mask"]))
    kept = get_custom_dataset(clevr, type="rl", max_length=lengths[2], **COLUMNS, **tools)
    assert [row["answer"] for row in kept] == ["4", "5"]


def test_a_batch_of_demonstrations_has_the_patches_of_its_rows(clevr: str, tools: dict[str, object]) -> None:
    rows = get_custom_dataset(clevr, type="sft", **COLUMNS, **tools)
    loader = PromptLoader(rows, batch_size=3, shuffle=False)
    batch = next(sft_batches(loader, 0, 0, 1, processor=tools["processor"]))
    assert batch["image_grid_thw"].tolist() == [[[1, 4, 8]], [[1, 4, 4]], [[1, 6, 4]]]
    for row, size in enumerate(("wide", "small", "tall")):
        images = process_images(tools["processor"], [picture(size, row)])
        patches = images.pixel_values.shape[0]
        assert torch.equal(batch["pixel_values"][row, :patches], images.pixel_values)
        assert not batch["pixel_values"][row, patches:].any()
    answers = [tools["tokenizer"].decode(ids[mask.bool()]) for ids, mask in zip(batch["input_ids"], batch["loss_mask"])]
    assert answers == ["3<|end|>", "4<|end|>", "5<|end|>"]
    empty = sft_batches(PromptLoader(rows, 2, shuffle=False, drop_last=False), 0, 1, 2, processor=tools["processor"])
    assert [len(next(empty)) for _ in range(2)] == [1, 0], "a rank without rows"
    with pytest.raises(ValueError, match=r"^processor must be given for rows with images: got None"):
        next(sft_batches(loader, 0, 0, 1))


CHATS = """
from PIL import Image

def rows(split, *, seed, wide):
    first = [{"role": "user", "content": "<image>How many?"}, {"role": "assistant", "content": "12"}]
    second = [{"role": "user", "content": "And now?<image>"}, {"role": "assistant", "content": "7"}]
    return [{"messages": [*first, *second], "shown": [wide, Image.new("L", (56, 56))]}]
"""


def test_conversations_with_images_are_learned(tmp_path, tools: dict[str, object]) -> None:
    """Each turn of the assistant, wherever images push it."""
    picture("wide").save(tmp_path / "wide.png")
    (tmp_path / "chats.py").write_text(CHATS)
    source = f"{tmp_path}/chats.py:rows?wide={tmp_path}/wide.png"
    (row,) = get_custom_dataset(source, type="sft", image_key="shown", answer_key=None, **tools)
    learned = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    assert tools["tokenizer"].decode(learned) == "12<|end|>7<|end|>"
    assert row["input_ids"].count(image_token_id(tools["tokenizer"])) == 8 + 4
    (prompt, *_), told = show([{"role": "user", "content": "Which?"}], 2, "row 0"), row["images"]
    assert prompt["content"] == [IMAGE, IMAGE, text("Which?")] and len(told) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "Count.", "images": []}, r"every row must have images in images: got \[\] in row 0"),
        ({"problem": "Count."}, "every row must have images in images: got None in row 0 of"),
        (
            {"problem": "<image><image>", "images": [b""]},
            "must show each of its images once: got 2 marks <image> for 1",
        ),
        ({"problem": "Count.", "images": [b"no image"]}, "an image must be a file that PIL can read: got cannot"),
    ],
    ids=["none", "no column", "marks", "broken"],
)
def test_rows_that_can_not_be_shown_are_refused(row: dict, message: str, tools: dict[str, object], monkeypatch) -> None:
    monkeypatch.setattr("arealite.dataset.read_rows", lambda *_: Rows([{"answer": "1", **row}]))
    with pytest.raises(ValueError, match=message):
        get_custom_dataset("clevr_count_70k", type="sft", **COLUMNS, **tools)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_script_that_shows_no_images_is_not_given_any(clevr: str, kind: str, tools: dict[str, object]) -> None:
    """It would ask about pictures that the model never sees."""
    with pytest.raises(
        ValueError, match=r"^processor must be given for rows with images \(images of .*: got None\. Use"
    ):
        get_custom_dataset(clevr, type=kind, tokenizer=tools["tokenizer"], **COLUMNS)


def test_pairs_are_about_texts(clevr: str, tools: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^pairs of answers must be about texts: got the image_key images"):
        get_custom_dataset(clevr, type="dpo", tokenizer=tools["tokenizer"], **COLUMNS)
