"""Make or load the data that several sections of the book share.

Each loader says what is generated and what was measured; the same seed gives
the same data.
"""

import gzip
import hashlib
import os
import re
import struct
import zlib
from functools import cache
from http.client import HTTPException
from itertools import takewhile
from pathlib import Path
from urllib.request import urlopen
from zlib import crc32

import torch


# --8<-- [start:road_temperature]
def road_temperature(position):
    """Give the true temperature at a place of the road: 2 sin x + x.

    position (...) in units of 10 km -> temperature (...) in degrees above
    that of the road's start. Made up, so that estimates have a truth to meet.
    """
    return 2 * torch.sin(position) + position


# --8<-- [end:road_temperature]


# --8<-- [start:road_readings]
def road_readings(seed, num_readings=40):
    """Draw stations along a road of 50 km and read their thermometers.

    seed -> positions (S,), in order, in units of 10 km; readings (S,), the
    true temperature and noise of standard deviation 1. Generated.
    """
    generator = torch.Generator().manual_seed(seed)
    places = 5 * torch.rand(num_readings, generator=generator)
    positions = places.sort().values
    noise = torch.randn(num_readings, generator=generator)
    return positions, road_temperature(positions) + noise


# --8<-- [end:road_readings]


# --8<-- [start:handwritten_digits]
def handwritten_digits(num_train=1200, seed=0):
    """Load scikit-learn's 1,797 handwritten digits and split them.

    -> (images (S, 64) in 0..1, labels (S,)) to learn from and the same
    for the test, the images of 8 x 8 pixels as rows. Measured, not generated.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) / 16
    labels = torch.tensor(labels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    train, test = order[:num_train], order[num_train:]
    return (images[train], labels[train]), (images[test], labels[test])


# --8<-- [end:handwritten_digits]


# --8<-- [start:english_number]
def english_number(number):
    """Write a number in English, → its words without commas and hyphens."""
    from num2words import num2words

    return re.findall("[a-z]+", num2words(number))


# --8<-- [end:english_number]


# --8<-- [start:german_number]
def german_number(number):
    """Write a number from 0 to 999,999 in German, cut into its pieces.

    German writes a number as one word; the longest piece that fits is cut
    off first. Raises `ValueError` if the pieces do not make up the word.
    """
    from num2words import num2words

    pieces = """zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig
        tausend hundert zehn elf zwölf und null eins ein zwei drei vier fünf
        sechs sech sieben sieb acht neun"""
    longest_first = sorted(pieces.split(), key=len, reverse=True)
    word = num2words(number, lang="de")
    found = re.findall("|".join(longest_first), word)
    if "".join(found) != word:
        raise ValueError(f"{number}: the pieces {found} do not make {word}")
    return found


# --8<-- [end:german_number]


# --8<-- [start:number_parts]
def number_parts(seed=0):
    """Deal the numbers 1 … 999 out to training, validation and test.

    → three lists of 799, 100 and 100 numbers without a common member; 0 is
    left out, since no other number has its word.
    """
    generator = torch.Generator().manual_seed(seed)
    order = (1 + torch.randperm(999, generator=generator)).tolist()
    return order[:799], order[799:899], order[899:]


# --8<-- [end:number_parts]


# --8<-- [start:number_pair]
def number_pair(numbers, write=(english_number, german_number)):
    """Write a list of numbers in both languages, a comma between two.

    → (English words, German pieces), two lists of strings.
    """
    pair = []
    for words_of in write:
        words = [word for each in numbers for word in [",", *words_of(each)]]
        pair.append(words[1:])
    return tuple(pair)


# --8<-- [end:number_pair]


# --8<-- [start:draw_numbers]
def draw_numbers(numbers, count, *, large=False, generator=None):
    """Draw a list of `count` numbers, with replacement, → a tuple.

    `large`: numbers from 1,001 to 999,999, whose thousands and whose rest
    are both members of `numbers`. Without a generator, the global random
    state of torch is used.
    """
    shape = (2 if large else 1, count)
    places = torch.randint(len(numbers), shape, generator=generator).tolist()
    drawn = [[numbers[place] for place in row] for row in places]
    if large:
        pairs = zip(*drawn, strict=True)
        return tuple(1000 * thousands + rest for thousands, rest in pairs)
    return tuple(drawn[0])


# --8<-- [end:draw_numbers]


# --8<-- [start:number_pairs]
def number_pairs(numbers, count, size, *, large=False, seed=0):
    """Draw `size` different lists of `count` numbers, to measure on.

    → pairs as of `number_pair`. For `count` 1 there are no more lists than
    numbers. Generated; the same seed gives the same lists.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(size, len(set(numbers)) ** (2 * count if large else count))
    lists, write = {}, (cache(english_number), cache(german_number))
    while len(lists) < size:
        drawn = draw_numbers(numbers, count, large=large, generator=generator)
        lists[drawn] = number_pair(drawn, write)
    return list(lists.values())


# --8<-- [end:number_pairs]


# --8<-- [start:Vocabulary]
class Vocabulary:
    """Number the words of an iterable of sentences, which are lists of words.

    Four come first: `<pad>` 0 fills up rows, `<bos>` 1 begins and `<eos>` 2
    ends a sentence, `<unk>` 3 stands for words that are not here.
    """

    pad_id, bos_id, eos_id, unk_id = range(4)

    def __init__(self, sentences):
        words = sorted({word for sentence in sentences for word in sentence})
        self.words = ["<pad>", "<bos>", "<eos>", "<unk>", *words]
        self.ids = {word: place for place, word in enumerate(self.words)}

    def __len__(self):
        return len(self.words)

    def encode(self, words):
        """Turn a list of words into a list of ids."""
        return [self.ids.get(word, self.unk_id) for word in words]

    def decode(self, ids):
        """Turn ids into words, up to the first `<eos>`, which is left out."""
        before = takewhile(lambda each: each != self.eos_id, ids)
        return [self.words[each] for each in before]


# --8<-- [end:Vocabulary]


# --8<-- [start:number_vocabularies]
def number_vocabularies(numbers):
    """Make the two vocabularies from the words of these numbers.

    → (English, German); the comma and the thousand are in both.
    """
    lists = [number_pair((number, 1000)) for number in numbers]
    english, german = zip(*lists, strict=True)
    return Vocabulary(english), Vocabulary(german)


# --8<-- [end:number_vocabularies]


# --8<-- [start:pad_rows]
def pad_rows(rows, pad_id):
    """Fill up lists of ids to the length of the longest.

    → tokens (B, length of the longest), lengths (B,).
    """
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.full((len(rows), max(map(len, rows))), pad_id)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    return tokens, lengths


# --8<-- [end:pad_rows]


# --8<-- [start:encode_pairs]
def encode_pairs(pairs, vocabularies):
    """Turn pairs of sentences into tensors of ids.

    A source ends with `<eos>`, so that no length is 0. A target begins with
    `<bos>` and ends with `<eos>`.
    → source (B, S), its lengths (B,), target (B, T + 1).
    """
    english, german = vocabularies
    source = [[*english.encode(words), english.eos_id] for words, _ in pairs]
    target = [
        [german.bos_id, *german.encode(words), german.eos_id]
        for _, words in pairs
    ]
    source, source_lens = pad_rows(source, english.pad_id)
    target, _ = pad_rows(target, german.pad_id)
    return source, source_lens, target


# --8<-- [end:encode_pairs]


# --8<-- [start:number_batches]
def number_batches(numbers, vocabularies, *, batch_size=64, max_count=4):
    """Draw batches of number lists without end, as of `encode_pairs`.

    Seven of eight lists have 1 to `max_count` numbers below 1,000, each
    length equally often; the eighth is a single number above. Numbers of one
    or two words, which are rare, count four times. Draws from the global
    random state of torch, which `train` seeds.
    """
    short = [each for each in numbers if len(english_number(each)) < 3]
    pool = [*numbers, *3 * short]
    write = cache(english_number), cache(german_number)
    while True:
        counts = torch.randint(1, max_count + 1, (batch_size,)).tolist()
        above = (torch.rand(batch_size) < 1 / 8).tolist()
        lists = [
            draw_numbers(pool, 1 if large else count, large=large)
            for count, large in zip(counts, above, strict=True)
        ]
        pairs = [number_pair(drawn, write) for drawn in lists]
        yield encode_pairs(pairs, vocabularies)


# --8<-- [end:number_batches]


# --8<-- [start:alphabet]
def alphabet():
    """Give the 70 characters of our texts: ASCII without capital letters.

    The place of a character in this string is its number, its *id*.
    """
    printable = "\n" + "".join(map(chr, range(32, 127)))
    return "".join(each for each in printable if not each.isupper())


# --8<-- [end:alphabet]


# --8<-- [start:plain]
def plain(text):
    """Write a text in our alphabet: lower case, straight quotes, no tabs.

    A character that has no place in the alphabet becomes a question mark.
    """
    curly, straight = "‘’“”–—…", ("'", "'", '"', '"', "-", "-", "...")
    text = text.translate(str.maketrans(dict(zip(curly, straight))))
    text, known = text.expandtabs(4).lower(), set(alphabet())
    return "".join(each if each in known else "?" for each in text)


# --8<-- [end:plain]


# --8<-- [start:characters_to_ids]
def characters_to_ids(text):
    """Number the characters of a text; → ids (T,), integers.

    Raises `ValueError` for a character that is not in `alphabet()`.
    """
    ids = {each: place for place, each in enumerate(alphabet())}
    unknown = sorted(set(text) - set(ids))
    if unknown:
        raise ValueError(f"not in the alphabet: {unknown}")
    return torch.tensor([ids[each] for each in text], dtype=torch.long)


# --8<-- [end:characters_to_ids]


# --8<-- [start:ids_to_characters]
def ids_to_characters(ids):
    """Write ids (T,) as the text that they stand for."""
    letters = alphabet()
    return "".join(letters[place] for place in ids.tolist())


# --8<-- [end:ids_to_characters]


# --8<-- [start:share_out]
def share_out(topics):
    """Sort topics into three parts; → {part: [name]}.

    Validation and test get at most a tenth of the characters each, training
    the rest. The order is that of a checksum of the names: the same on every
    machine, and no order of the alphabet.
    """
    room = sum(map(len, topics.values())) // 10
    parts = {"train": [], "validation": [], "test": []}
    left = {"test": room, "validation": room}
    for name in sorted(topics, key=lambda name: (crc32(name.encode()), name)):
        fits = [part for part in left if len(topics[name]) <= left[part]]
        parts[fits[0] if fits else "train"].append(name)
        if fits:
            left[fits[0]] -= len(topics[name])
    return parts


# --8<-- [end:share_out]


# --8<-- [start:documentation]
def documentation():
    """Load the help texts that come with Python; → {part: text}.

    Real text, written by people for `help()`; each version of Python has its
    own. The parts are train, validation and test. They share no topic and
    no paragraph: what several topics repeat is kept once, first in the test.
    """
    from pydoc_data.topics import topics

    texts, seen = {}, set()
    for part, names in reversed(share_out(topics).items()):
        kept = []
        for name in names:
            for paragraph in re.split(r"\n\s*\n", plain(topics[name])):
                words = " ".join(paragraph.split())
                if words and words not in seen:
                    kept.append(paragraph.strip("\n"))
                    seen.add(words)
        texts[part] = "\n\n".join(kept)
    return texts


# --8<-- [end:documentation]


# --8<-- [start:draw_windows]
def draw_windows(ids, batch_size, length):
    """Yield windows of a text for ever, from random places.

    ids (the whole text,) → inputs (B, T = length) and targets (B, T): the
    same, one character later. Draws from torch's global random state.
    Raises `ValueError` if the text is too short.
    """
    last = len(ids) - length  # the last place where a target is left over
    if last < 1 or min(batch_size, length) < 1:
        raise ValueError(
            f"no {batch_size} windows of {length} characters and the next"
            f" in a text of {len(ids)}"
        )
    while True:
        starts = torch.randint(last, (batch_size, 1))
        windows = ids[starts + torch.arange(length + 1)]
        yield windows[:, :-1], windows[:, 1:]


# --8<-- [end:draw_windows]


def find_data(name):
    """Find a data file of another package; → its path, or None.

    `name` begins with usr/: where its Debian package puts it. Looked for
    from the root, then below the folder that BOOK_DATA names, if it is set.
    """
    roots = [Path("/"), Path(os.environ.get("BOOK_DATA") or "/")]
    return next((r / name for r in roots if (r / name).is_file()), None)


FASHION_MNIST = {  # each file, and the SHA-256 sum of what it holds
    "train-images-idx3-ubyte.gz": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    "train-labels-idx1-ubyte.gz": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
    ),
}


def unpack_idx(packed, name):
    """Unpack a file of Fashion-MNIST, given as bytes; → uint8 tensor.

    The format: a number of axes, their lengths, then a byte an entry.
    Raises `ValueError` unless the file holds what was published.
    """
    try:
        data = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error):
        data = b""
    if hashlib.sha256(data).hexdigest() != FASHION_MNIST[name]:
        raise ValueError(f"{name} is damaged: it is not what was published")
    start = 4 + 4 * data[3]
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    return torch.frombuffer(
        bytearray(data), dtype=torch.uint8, offset=start
    ).reshape(shape)


def fetch_fashion_mnist(name, folder):
    """Fetch a file from the data set's own repository; → its bytes.

    It is kept in a folder if it is whole. Raises `FileNotFoundError`, which
    says what to do, if the network does not help.
    """
    kept = Path(folder, name)
    repository = "https://raw.githubusercontent.com/zalandoresearch"
    url = f"{repository}/fashion-mnist/master/data/fashion/{name}"
    try:
        with urlopen(url, timeout=30) as answer:
            packed = answer.read()
    except (OSError, HTTPException) as error:
        raise FileNotFoundError(
            f"Fashion-MNIST: no {name} in /usr/share/datasets/fashion-mnist,"
            f" nor there below $BOOK_DATA, nor as {kept}, nor at {url}"
            f" ({error}). On Debian: apt-get install dataset-fashion-mnist"
        ) from error
    unpack_idx(packed, name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_bytes(packed)
    part.replace(kept)  # at once: nobody finds half a file
    return packed


# --8<-- [start:fashion_mnist]
def fashion_mnist():
    """Load 70,000 pictures of garments, photographed and labelled by a shop.

    → (images (60000, 1, 28, 28), labels (60000,)) to learn from and the same
    of 10,000 for the test; pixels are bytes, labels 0 to 9. The files are
    those of a Debian package, of an earlier download, or fetched now.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home, "attention-you-can-run", "fashion-mnist")
    found = []
    for name in FASHION_MNIST:
        path = find_data(f"usr/share/datasets/fashion-mnist/{name}")
        if path is None and (folder / name).is_file():
            path = folder / name
        packed = (
            path.read_bytes() if path else fetch_fashion_mnist(name, folder)
        )
        found.append(unpack_idx(packed, name))
    images, labels, test_images, test_labels = found
    train = images[:, None], labels.long()
    return train, (test_images[:, None], test_labels.long())


# --8<-- [end:fashion_mnist]


def read_catalogue(path):
    """Read a file of translations (gettext, .mo); → [(source, target)].

    The file: five numbers, then for each source, and for each target, its
    length and place. Sources lose the context before them, plurals stay out.
    Raises `ValueError` unless it is such a file, little-endian.
    """
    data = path.read_bytes()
    if data[:4] != b"\xde\x12\x04\x95" or len(data) < 20:
        raise ValueError(f"{path.name} is no catalogue of translations")
    _, count, *tables = struct.unpack("<4I", data[4:20])
    columns = []
    for table in tables:
        spans = struct.iter_unpack("<2I", data[table : table + 8 * count])
        columns.append([data[a : a + n].decode() for n, a in spans])
    pairs = [(a.split("\x04")[-1], b) for a, b in zip(*columns, strict=True)]
    return [(a, b) for a, b in pairs if a and "\0" not in a]


# --8<-- [start:interface_words]
def interface_words(text):
    """Cut a string of an interface into words, in small letters.

    "Insert ~Row…" → ["insert", "row"]; "l'image" are two words, l' and
    image. What is more than words, markup say, gives an empty list.
    """
    text = re.sub("[_~]", "", text).replace("\u2019", "'").lower()
    text = re.sub(r"[\s.:…]+$", "", text)
    words = re.findall(r"[^\W\d_]+'?", text)
    return words if "".join(words) == re.sub(r"[\s-]", "", text) else []


# --8<-- [end:interface_words]


# --8<-- [start:interface_pairs]
def interface_pairs():
    """Load short strings of LibreOffice's interface, English and French.

    → {part: [(English words, French words)]}, two to eight English words. A
    checksum of the English words says which part: of 16, one is test, one
    validation. Real translations, made by volunteers (MPL-2.0). Raises
    `FileNotFoundError` without the package.
    """
    inner = "usr/lib/libreoffice/program/resource/fr/LC_MESSAGES"
    first = find_data(f"{inner}/sw.mo")
    if first is None:
        raise FileNotFoundError(
            f"no French strings of LibreOffice in /{inner}, nor there below"
            " $BOOK_DATA. On Debian: apt-get install libreoffice-l10n-fr"
        )
    found = {}
    for path in sorted(first.parent.glob("*.mo")):
        for source, target in read_catalogue(path):
            words, others = interface_words(source), interface_words(target)
            if 2 <= len(words) <= 8 and 1 <= len(others) <= 12:
                found.setdefault(tuple(words), tuple(others))
    return deal_out(found)


# --8<-- [end:interface_pairs]


def deal_out(pairs):
    """Deal {source: target} out by a checksum of the source's words."""
    parts = {"train": [], "validation": [], "test": []}
    for source, target in sorted(pairs.items()):
        place = crc32(" ".join(source).encode()) % 16
        part = {0: "test", 1: "validation"}.get(place, "train")
        parts[part].append((source, target))
    return parts
