"""Proof of `snippets.datasets`: sizes, seeds and what is said of the data."""

import gzip
import hashlib
import io
import math
import re
import socket
import struct
from http.client import IncompleteRead
from pathlib import Path
from pydoc_data import topics as pydoc_topics
from types import SimpleNamespace
from urllib.error import HTTPError, URLError

import pytest
import torch

from snippets import datasets
from snippets.datasets import (
    FASHION_MNIST,
    Vocabulary,
    alphabet,
    characters_to_ids,
    documentation,
    draw_numbers,
    draw_windows,
    encode_pairs,
    english_number,
    fashion_mnist,
    fetch_fashion_mnist,
    find_data,
    german_number,
    handwritten_digits,
    ids_to_characters,
    number_batches,
    number_pair,
    number_pairs,
    number_parts,
    number_vocabularies,
    pad_rows,
    plain,
    road_readings,
    road_temperature,
    share_out,
    unpack_idx,
)


def test_road_temperature_is_two_sines_and_a_slope():
    places = torch.tensor([0.0, math.pi / 2, math.pi], dtype=torch.double)
    expected = torch.tensor([0.0, 2 + math.pi / 2, math.pi], dtype=torch.double)
    torch.testing.assert_close(road_temperature(places), expected)


def test_readings_stand_in_order_on_the_road():
    places, readings = road_readings(3, num_readings=37)
    assert places.shape == readings.shape == (37,)
    assert (places.diff() >= 0).all()
    assert places.min() >= 0
    assert places.max() <= 5


def test_the_noise_of_the_readings_is_that_of_the_text():
    places, readings = road_readings(5, num_readings=20_011)
    noise = readings - road_temperature(places)
    assert noise.mean().item() == pytest.approx(0, abs=0.03)
    assert noise.std().item() == pytest.approx(1, abs=0.03)
    assert abs(torch.corrcoef(torch.stack([places, noise]))[0, 1]) < 0.03


def test_a_seed_gives_the_same_readings_and_leaves_the_global_state():
    state = torch.get_rng_state()
    first, again, other = road_readings(1), road_readings(1), road_readings(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[1], other[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_digits_are_split_without_loss_or_overlap():
    pytest.importorskip("sklearn", reason="a package of section 2")
    (images, labels), (test_images, test_labels) = handwritten_digits(num_train=1009)
    assert images.shape == (1009, 64)
    assert test_images.shape == (788, 64)
    assert labels.shape == (1009,)
    assert images.min() == 0
    assert images.max() == 1
    assert set(labels.tolist()) == set(test_labels.tolist()) == set(range(10))
    everything = torch.cat([images, test_images])
    assert len(everything.unique(dim=0)) == 1797


def test_another_seed_gives_another_split():
    pytest.importorskip("sklearn", reason="a package of section 2")
    first, again, other = (handwritten_digits(seed=seed)[0][1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ------------------------------------------------------------ number words


@pytest.fixture(scope="module")
def parts():
    return number_parts()


@pytest.fixture(scope="module")
def vocabularies(parts):
    pytest.importorskip("num2words", reason="a package of section 4")
    return number_vocabularies(parts[0])


def test_numbers_are_written_in_english_words_alone():
    pytest.importorskip("num2words", reason="a package of section 4")
    assert english_number(374) == ["three", "hundred", "and", "seventy", "four"]
    assert english_number(1_001) == ["one", "thousand", "and", "one"]
    assert english_number(42) == ["forty", "two"]


def test_german_words_come_in_pieces_and_units_before_tens():
    pytest.importorskip("num2words", reason="a package of section 4")
    assert german_number(374) == ["drei", "hundert", "vier", "und", "siebzig"]
    assert german_number(21) == ["ein", "und", "zwanzig"]
    assert german_number(101) == ["ein", "hundert", "eins"]
    assert german_number(17) == ["sieb", "zehn"]
    assert german_number(66) == ["sechs", "und", "sechzig"]
    assert german_number(16_000) == ["sech", "zehn", "tausend"]


def test_german_pieces_join_to_the_word_for_every_number_up_to_a_thousand():
    num2words = pytest.importorskip("num2words", reason="a package of section 4").num2words
    generator = torch.Generator().manual_seed(0)
    above = (1000 + torch.randint(999_000, (300,), generator=generator)).tolist()
    pieces = set()
    for number in [*range(1001), *above, 999_999]:
        found = german_number(number)
        assert "".join(found) == num2words(number, lang="de")
        pieces |= set(found)
    assert len(pieces) <= 28


def test_different_numbers_have_different_words():
    pytest.importorskip("num2words", reason="a package of section 4")
    for write in (english_number, german_number):
        assert len({tuple(write(number)) for number in range(1000)}) == 1000


def test_a_word_that_the_pieces_do_not_make_up_is_refused():
    pytest.importorskip("num2words", reason="a package of section 4")
    with pytest.raises(ValueError, match="1000000"):
        german_number(1_000_000)


def test_the_numbers_are_dealt_out_without_overlap(parts):
    assert [len(part) for part in parts] == [799, 100, 100]
    assert sorted(number for part in parts for number in part) == list(range(1, 1000))


def test_a_seed_gives_the_same_parts_and_leaves_the_global_state(parts):
    state = torch.get_rng_state()
    assert number_parts() == parts
    assert number_parts(seed=1) != parts
    number_pairs(parts[0], 2, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_pair_is_a_list_in_two_languages_with_commas_between():
    pytest.importorskip("num2words", reason="a package of section 4")
    english, german = number_pair((706, 42))
    assert english == ["seven", "hundred", "and", "six", ",", "forty", "two"]
    assert german == ["sieben", "hundert", "sechs", ",", "zwei", "und", "vierzig"]


@pytest.mark.parametrize("large", [False, True])
def test_drawn_numbers_are_members_of_their_part(parts, large):
    for part in parts:
        drawn = draw_numbers(part, 211, large=large)
        assert len(drawn) == 211
        pieces = {piece for number in drawn for piece in divmod(number, 1000)}
        assert pieces <= ({*part} if large else {0, *part})
        assert all(number > 1000 for number in drawn) == large


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("large", [False, True])
def test_pairs_to_measure_on_are_of_one_part_one_length_and_all_different(parts, count, large):
    pytest.importorskip("num2words", reason="a package of section 4")
    pairs = number_pairs(parts[2], count, 53, large=large)
    assert len(pairs) == 53
    assert len({(tuple(english), tuple(german)) for english, german in pairs}) == 53
    own = {tuple(english_number(number)) for number in parts[2]}
    for english, german in pairs:
        assert english.count(",") == german.count(",") == count - 1
        if not large:
            heads = " ".join(english).split(" , ")
            assert {tuple(head.split()) for head in heads} <= own
    assert number_pairs(parts[2], count, 53, large=large) == pairs
    assert number_pairs(parts[2], count, 53, large=large, seed=1) != pairs


def test_there_are_no_more_single_numbers_than_the_part_has(parts):
    pytest.importorskip("num2words", reason="a package of section 4")
    pairs = number_pairs(parts[1], 1, 500)
    assert len(pairs) == 100
    everything = {tuple(english_number(number)) for number in parts[1]}
    assert {tuple(words) for words, _ in pairs} == everything


def test_no_list_of_the_test_holds_a_number_of_the_training(parts):
    pytest.importorskip("num2words", reason="a package of section 4")
    seen = {tuple(english_number(number)) for number in parts[0]}
    for part in parts[1:]:
        for english, _ in number_pairs(part, 4, 101):
            for words in " ".join(english).split(" , "):
                assert tuple(words.split()) not in seen


def test_the_training_numbers_have_every_word_of_the_others(parts, vocabularies):
    for large in (False, True):
        for part in parts:
            for pair in number_pairs(part, 2, 211, large=large):
                for words, vocabulary in zip(pair, vocabularies, strict=True):
                    assert vocabulary.unk_id not in vocabulary.encode(words)


def test_a_vocabulary_has_its_four_words_first_and_every_word_once(vocabularies):
    for vocabulary in vocabularies:
        assert vocabulary.words[:4] == ["<pad>", "<bos>", "<eos>", "<unk>"]
        assert [vocabulary.pad_id, vocabulary.bos_id, vocabulary.eos_id] == [0, 1, 2]
        assert vocabulary.unk_id == 3
        assert len(set(vocabulary.words)) == len(vocabulary.words) == len(vocabulary)


def test_a_vocabulary_does_not_depend_on_the_order_of_sentences():
    sentences = [["b", "a"], ["c"], ["a"]]
    assert Vocabulary(sentences).words == Vocabulary(sentences[::-1]).words
    assert Vocabulary(sentences).words[4:] == ["a", "b", "c"]


def test_decoding_undoes_encoding_and_stops_at_the_first_end():
    vocabulary = Vocabulary([["x", "y", "z"]])
    ids = vocabulary.encode(["y", "z", "y"])
    assert vocabulary.decode(ids) == ["y", "z", "y"]
    assert vocabulary.decode(torch.tensor([*ids, 2, ids[0], 2, 2])) == ["y", "z", "y"]
    assert vocabulary.decode([2, *ids]) == []
    assert vocabulary.encode(["y", "what"])[1] == vocabulary.unk_id


def test_rows_are_filled_up_behind_their_words():
    tokens, lengths = pad_rows([[5, 6], [7], [8, 9, 4]], 0)
    assert tokens.tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 4]]
    assert lengths.tolist() == [2, 1, 3]
    assert tokens.dtype == lengths.dtype == torch.int64


def test_sources_end_with_eos_and_targets_begin_with_bos_and_end_with_eos():
    english, german = Vocabulary([["one", "two"]]), Vocabulary([["eins", "zwei"]])
    pairs = [(["one"], ["eins"]), (["two", "one"], ["zwei", "eins", "eins"])]
    source, source_lens, target = encode_pairs(pairs, (english, german))
    one, two = english.encode(["one", "two"])
    eins, zwei = german.encode(["eins", "zwei"])
    assert source.tolist() == [[one, 2, 0], [two, one, 2]]
    assert source_lens.tolist() == [2, 3]
    assert target.tolist() == [[1, eins, 2, 0, 0], [1, zwei, eins, eins, 2]]


def test_dropping_the_last_column_costs_no_real_token():
    # The row of the text: an end in the input only where padding is predicted.
    target = torch.tensor([[1, 5, 6, 2, 0, 0]])
    given, wanted = target[:, :-1], target[:, 1:]
    assert given.tolist() == [[1, 5, 6, 2, 0]]
    assert wanted.tolist() == [[5, 6, 2, 0, 0]]
    assert (wanted != 0).tolist() == [[True, True, True, False, False]]


def test_batches_are_lists_of_the_training_numbers(parts, vocabularies):
    batches = number_batches(parts[0], vocabularies, batch_size=131, max_count=3)
    torch.manual_seed(1)
    source, source_lens, target = next(batches)
    english, german = vocabularies
    assert len(source) == len(source_lens) == len(target) == 131
    assert ((source != english.pad_id).sum(-1) == source_lens).all()
    assert source.shape[1] == source_lens.max()
    assert (target[:, 0] == german.bos_id).all()
    assert ((target == german.eos_id).sum(-1) == 1).all()
    by_words = {tuple(english_number(number)): german_number(number) for number in parts[0]}
    counts, large = [], 0
    for row, translation in zip(source, target, strict=True):
        words = english.decode(row)
        right = german.decode(translation[1:])
        if "thousand" in words:
            large += 1
            assert "," not in words
            continue
        heads = [tuple(head.split()) for head in " ".join(words).split(" , ")]
        expected = [piece for head in heads for piece in [",", *by_words[head]]][1:]
        assert right == expected
        counts.append(len(heads))
    assert {1, 2, 3} == set(counts)
    assert 4 <= large <= 31  # one in eight


def test_numbers_of_one_or_two_words_are_drawn_four_times_as_often(parts, vocabularies):
    batches = number_batches(parts[0], vocabularies, batch_size=4001, max_count=1)
    torch.manual_seed(5)
    source, source_lens, _ = next(batches)
    below = (source != vocabularies[0].ids["thousand"]).all(dim=-1)
    found = (source_lens[below] <= 3).float().mean().item()  # eos is one of the three
    short = sum(len(english_number(number)) <= 2 for number in parts[0])
    assert found == pytest.approx(4 * short / (len(parts[0]) + 3 * short), abs=0.03)


def test_batches_repeat_with_the_seed_and_differ_from_one_another(parts, vocabularies):
    batches = number_batches(parts[0], vocabularies, batch_size=5)
    torch.manual_seed(3)
    first, second = next(batches), next(batches)
    torch.manual_seed(3)
    again = next(number_batches(parts[0], vocabularies, batch_size=5))
    assert all(map(torch.equal, first, again))
    assert first[0].shape != second[0].shape or not torch.equal(first[0], second[0])


# The documentation of Python as text.


def test_the_alphabet_is_ascii_without_capitals():
    letters = alphabet()
    assert len(letters) == len(set(letters)) == 70
    assert set("abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;()[]{}'\"`_*=") <= set(letters)
    assert letters == letters.lower()
    assert letters.isascii()


def test_plain_text_is_written_in_the_alphabet():
    """Keep what can be kept, one character for one; mark the rest."""
    assert plain("A “b” ‘c’ – d — e") == "a \"b\" 'c' - d - e"
    assert plain("x…") == "x..."
    assert plain("→é") == "??"
    assert plain("a\tb\n\tc") == "a   b\n    c"
    everything = "".join(map(chr, range(1, 0x2100)))
    assert set(plain(everything)) == set(alphabet())
    assert plain(plain(everything)) == plain(everything)


def test_ids_stand_for_characters():
    text = "def f(x):\n    return x"
    ids = characters_to_ids(text)
    assert (ids.dtype, ids.shape) == (torch.int64, (len(text),))
    assert ids_to_characters(ids) == text
    assert characters_to_ids(alphabet()).tolist() == list(range(70))
    assert characters_to_ids("").shape == (0,)
    assert characters_to_ids("").dtype == torch.int64
    assert [alphabet()[each] for each in ids.tolist()] == list(text)


def test_ids_of_unknown_characters_are_an_error():
    with pytest.raises(ValueError, match=r"\['X', 'é'\]"):
        characters_to_ids("aéXX")


@pytest.mark.parametrize("count", (1, 7, 300))
def test_topics_are_shared_out_without_loss_or_overlap(count):
    lengths = [(37 * place) % 101 + 1 for place in range(count)]
    topics = {f"topic {place}": "x" * length for place, length in enumerate(lengths)}
    parts = share_out(topics)
    assert list(parts) == ["train", "validation", "test"]
    assert sorted(sum(parts.values(), [])) == sorted(topics)
    size = {part: sum(len(topics[name]) for name in names) for part, names in parts.items()}
    for part in ("validation", "test"):
        assert size[part] <= sum(lengths) / 10
        assert count < 300 or size[part] > 0.09 * sum(lengths)
    assert share_out(dict(reversed(topics.items()))) == parts
    ranks = [sorted(topics).index(name) / count for name in parts["test"]]
    assert count < 300 or 0.3 < sum(ranks) / len(ranks) < 0.7, "no end of the alphabet"


def paragraphs(text):
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def test_the_parts_of_the_documentation_share_no_paragraph():
    """Whatever the version of Python: all in the alphabet, a tenth for each of the tests."""
    parts = documentation()
    assert set(parts) == {"train", "validation", "test"}
    seen = [line for part in parts.values() for line in paragraphs(part)]
    assert len(seen) == len(set(seen))
    assert "" not in seen
    total = sum(map(len, parts.values()))
    assert total > 200_000
    for name, part in parts.items():
        assert set(part) <= set(alphabet())
        assert name == "train" or 0.05 * total < len(part) < 0.15 * total
        assert part.count("?") < len(part) / 500, "nearly nothing is lost"
    assert documentation() == parts


def test_a_paragraph_of_two_topics_is_kept_once_and_in_the_test(monkeypatch):
    topics = {
        f"T{place}": f"\n\nOwn {place}.\n \nMore  of\n{place}.\n\nShared." for place in range(40)
    }
    monkeypatch.setattr(pydoc_topics, "topics", topics)
    shares, parts = share_out(topics), documentation()
    assert len(shares["test"]) >= 2
    for part, names in shares.items():
        own = {line for name in names for line in (f"own {name[1:]}.", f"more of {name[1:]}.")}
        found = paragraphs(parts[part])
        assert len(found) == len(set(found))
        assert set(found) == own | ({"shared."} if part == "test" else set())


def test_windows_hold_the_text_and_its_next_characters():
    ids = torch.arange(100, 123)
    inputs, targets = next(draw_windows(ids, 13, 5))
    assert inputs.shape == targets.shape == (13, 5)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(5))
    assert len(inputs[:, 0].unique()) > 1


def test_windows_come_from_every_place_of_the_text():
    """Reach the first and the last character, and nothing past them."""
    inputs, targets = next(draw_windows(torch.arange(11), 500, 3))
    assert sorted(set(inputs[:, 0].tolist())) == list(range(8))
    assert targets.max() == 10
    inputs, targets = next(draw_windows(torch.arange(4), 2, 3))
    assert inputs.tolist() == [[0, 1, 2]] * 2
    assert targets.tolist() == [[1, 2, 3]] * 2


def test_windows_repeat_with_the_seed_and_differ_from_one_another():
    batches = draw_windows(torch.arange(1009), 7, 5)
    torch.manual_seed(3)
    first, second = next(batches), next(batches)
    torch.manual_seed(3)
    again = next(draw_windows(torch.arange(1009), 7, 5))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize(("batch_size", "length"), ((2, 11), (2, 12), (0, 3), (2, 0)))
def test_windows_need_a_text_that_is_longer(batch_size, length):
    with pytest.raises(ValueError, match=f"{batch_size} windows of {length} .* of 11"):
        next(draw_windows(torch.arange(11), batch_size, length))


# Garments


PLACE = "usr/share/datasets/fashion-mnist"
SHAPES = {
    "train-images-idx3-ubyte.gz": (13, 7, 5),
    "train-labels-idx1-ubyte.gz": (13,),
    "t10k-images-idx3-ubyte.gz": (11, 7, 5),
    "t10k-labels-idx1-ubyte.gz": (11,),
}


def pack(name, extra=b""):
    """Give a small file in the format of Fashion-MNIST, and its entries."""
    shape = SHAPES[name]
    entries = torch.arange(torch.Size(shape).numel()) * 37 % (10 if "labels" in name else 256)
    head = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)
    data = head + bytes(entries.tolist())
    return gzip.compress(data + extra, mtime=0), entries.view(shape)


def lay_out(folder):
    """Write the four small files into a folder."""
    folder.mkdir(parents=True)
    for name in SHAPES:
        (folder / name).write_bytes(pack(name)[0])


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Move root, BOOK_DATA and cache to empty folders, and cut the network.

    Small files count as what was published. Gives the places and a list of
    the addresses asked for; `answers` holds what the network would give.
    """
    root = tmp_path / "root"

    class Moved:
        home = staticmethod(lambda: tmp_path / "home")

        def __new__(cls, *parts):
            return root if parts == ("/",) else Path(*parts)

    asked, answers = [], {}

    def urlopen(url, *, timeout):
        assert timeout > 0
        asked.append(url)
        if url.rsplit("/", 1)[-1] not in answers:
            raise URLError("no network in this test")
        return io.BytesIO(answers[url.rsplit("/", 1)[-1]])

    def closed(*_, **__):
        raise AssertionError("a test opened a connection")

    monkeypatch.setattr(datasets, "Path", Moved)
    monkeypatch.setattr(datasets, "urlopen", urlopen)
    monkeypatch.setattr(socket, "socket", closed)
    monkeypatch.setenv("BOOK_DATA", str(tmp_path / "book"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in FASHION_MNIST:
        data = gzip.decompress(pack(name)[0])
        monkeypatch.setitem(FASHION_MNIST, name, hashlib.sha256(data).hexdigest())
    return SimpleNamespace(
        root=root / PLACE, book=tmp_path / "book" / PLACE, asked=asked, answers=answers,
        cache=tmp_path / "cache" / "attention-you-can-run" / "fashion-mnist",
    )  # fmt: skip


def test_data_are_looked_for_where_a_package_installs_them_first(places):
    name = f"{PLACE}/some.gz"
    assert find_data(name) is None
    places.book.mkdir(parents=True)
    (places.book / "some.gz").write_text("of BOOK_DATA")
    assert find_data(name) == places.book / "some.gz"
    places.root.mkdir(parents=True)
    (places.root / "some.gz").write_text("installed")
    assert find_data(name) == places.root / "some.gz"


def test_a_folder_is_not_a_data_file(places):
    (places.root / "some.gz").mkdir(parents=True)
    assert find_data(f"{PLACE}/some.gz") is None


@pytest.mark.parametrize("value", [None, ""])
def test_without_book_data_only_the_installed_place_counts(places, monkeypatch, tmp_path, value):
    lay_out(tmp_path / PLACE)
    monkeypatch.chdir(tmp_path)
    if value is None:
        monkeypatch.delenv("BOOK_DATA")
    else:
        monkeypatch.setenv("BOOK_DATA", value)
    assert find_data(f"{PLACE}/{next(iter(SHAPES))}") is None


def test_the_real_root_is_the_root_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.delenv("BOOK_DATA", raising=False)
    (tmp_path / "file").write_text("x")
    assert find_data(str(tmp_path / "file").lstrip("/")) == tmp_path / "file"


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_unpacked_to_its_shape_and_its_bytes(places, name):
    packed, entries = pack(name)
    found = unpack_idx(packed, name)
    assert found.dtype == torch.uint8
    assert torch.equal(found, entries.to(torch.uint8))
    found.zero_()  # the memory is its own
    assert torch.equal(unpack_idx(packed, name), entries.to(torch.uint8))


def test_only_what_a_file_holds_counts_not_how_it_was_packed(places):
    name = "train-labels-idx1-ubyte.gz"
    packed, entries = pack(name)
    other = gzip.compress(gzip.decompress(packed), compresslevel=0, mtime=1)
    assert other != packed
    assert torch.equal(unpack_idx(other, name), entries.to(torch.uint8))


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: b"",
        lambda packed: packed[:-9],
        lambda packed: packed[:20],
        lambda packed: packed[:11] + b"\xff\xff" + packed[13:],
        lambda packed: b"<html>not found</html>",
        gzip.decompress,
        lambda packed: pack("t10k-images-idx3-ubyte.gz")[0],
        lambda packed: pack("train-images-idx3-ubyte.gz", b"\0")[0],
    ],
)
def test_what_is_not_the_published_file_is_refused_by_name(places, damage):
    name = "train-images-idx3-ubyte.gz"
    with pytest.raises(ValueError, match=name):
        unpack_idx(damage(pack(name)[0]), name)


def test_the_sums_are_those_of_four_different_files():
    assert list(FASHION_MNIST) == list(SHAPES)
    assert len(set(FASHION_MNIST.values())) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", x) for x in FASHION_MNIST.values())


def check_small_data(data):
    """Assert that these are the four small files, in the promised form."""
    for (images, labels), part in zip(data, ("train", "t10k"), strict=True):
        expected = pack(f"{part}-images-idx3-ubyte.gz")[1].to(torch.uint8)
        assert images.dtype == torch.uint8
        assert torch.equal(images, expected[:, None])
        assert labels.dtype == torch.int64
        assert torch.equal(labels, pack(f"{part}-labels-idx1-ubyte.gz")[1])


@pytest.mark.parametrize("place", ["root", "book", "cache"])
def test_images_and_labels_come_from_each_place_without_a_network(places, place):
    lay_out(getattr(places, place))
    check_small_data(fashion_mnist())
    assert places.asked == []


def test_a_nearer_place_goes_first(places):
    lay_out(places.root)
    for place in (places.book, places.cache):
        place.mkdir(parents=True)
        for name in SHAPES:
            (place / name).write_bytes(b"damaged: must not be read")
    check_small_data(fashion_mnist())
    for name in SHAPES:
        (places.root / name).unlink()
        (places.book / name).write_bytes(pack(name)[0])
    check_small_data(fashion_mnist())
    assert places.asked == []


def test_files_may_come_from_different_places(places):
    for place, name in zip((places.root, places.book, places.cache), SHAPES):
        place.mkdir(parents=True)
        (place / name).write_bytes(pack(name)[0])
    last = list(SHAPES)[-1]
    places.answers[last] = pack(last)[0]
    check_small_data(fashion_mnist())
    assert [url.rsplit("/", 1)[-1] for url in places.asked] == [last]


def test_what_is_fetched_is_kept_and_fetched_once(places):
    places.answers.update({name: pack(name)[0] for name in SHAPES})
    check_small_data(fashion_mnist())
    assert len(places.asked) == 4
    assert all(
        url.startswith("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/")
        for url in places.asked
    )
    assert sorted(x.name for x in places.cache.iterdir()) == sorted(SHAPES)
    check_small_data(fashion_mnist())
    assert len(places.asked) == 4


def test_the_cache_of_a_user_is_below_home(places, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    lay_out(tmp_path / "home" / ".cache" / "attention-you-can-run" / "fashion-mnist")
    check_small_data(fashion_mnist())


def test_without_data_the_message_says_where_and_how(places):
    with pytest.raises(FileNotFoundError) as caught:
        fashion_mnist()
    message = str(caught.value)
    first = next(iter(SHAPES))
    for part in (
        first, "/usr/share/datasets/fashion-mnist", "BOOK_DATA", str(places.cache / first),
        places.asked[0], "no network in this test", "apt-get install dataset-fashion-mnist",
    ):  # fmt: skip
        assert part in message
    assert len(places.asked) == 1
    assert not places.cache.exists()


@pytest.mark.parametrize(
    "error",
    [
        HTTPError("https://example.org", 404, "Not Found", None, None),
        TimeoutError("too slow"),
        ConnectionResetError("gone"),
        IncompleteRead(b"half of it"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_every_fault_of_the_network_is_a_missing_file(places, monkeypatch, error, late):
    def fail(*_, **__):
        raise error

    class Answer(io.BytesIO):
        read = fail

    monkeypatch.setattr(datasets, "urlopen", (lambda *_, **__: Answer()) if late else fail)
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        fetch_fashion_mnist("t10k-labels-idx1-ubyte.gz", places.cache)
    assert not places.cache.exists()


def test_a_damaged_answer_is_refused_and_not_kept(places):
    name = "t10k-labels-idx1-ubyte.gz"
    places.answers[name] = pack(name, b"\0")[0]
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        fetch_fashion_mnist(name, places.cache)
    assert not places.cache.exists()
    places.answers[name] = pack(name)[0]
    assert fetch_fashion_mnist(name, places.cache) == pack(name)[0]
    assert [x.name for x in places.cache.iterdir()] == [name]


def test_a_damaged_file_on_disk_is_named(places):
    lay_out(places.book)
    (places.book / "train-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="train-labels-idx1-ubyte.gz is damaged"):
        fashion_mnist()
    assert places.asked == []


def test_the_real_garments_are_as_many_and_as_even_as_published(monkeypatch):
    if not all(find_data(f"{PLACE}/{name}") for name in SHAPES):
        pytest.skip("Fashion-MNIST is neither installed nor below BOOK_DATA")
    monkeypatch.setattr(datasets, "urlopen", None)
    for part, number in (("train", 60_000), ("t10k", 10_000)):
        name = f"{part}-labels-idx1-ubyte.gz"
        labels = unpack_idx(Path(find_data(f"{PLACE}/{name}")).read_bytes(), name)
        assert labels.bincount().tolist() == [number // 10] * 10
    (images, labels), (test_images, test_labels) = fashion_mnist()
    assert images.shape == (60_000, 1, 28, 28)
    assert test_images.shape == (10_000, 1, 28, 28)
    assert labels.shape == (60_000,)
    assert test_labels.shape == (10_000,)
    assert labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert test_labels[:5].tolist() == [9, 2, 1, 1, 6]
    assert images.float().mean().item() / 255 == pytest.approx(0.2860, abs=1e-4)
    assert images.max() == 255
    boots, trousers = (images[labels == x].float().mean((0, 1)) for x in (9, 1))
    assert boots[:7].mean() < boots[-14:].mean()  # upright, not on its side
    assert trousers[:, 14].mean() > 3 * trousers[14, :5].mean()
