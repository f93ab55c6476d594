"""Random damage to zips of models: `mutated(content, random.Random(seed))`."""

import io
import json
import zipfile

# In place of what was there
NUMBERS = [0, -1, 1, 10**9, 10**30, 1e308, float("nan"), float("-inf")]
WRONG = [None, True, *NUMBERS, "", "x", "lin_x", [], [1], [[]], {}, {"x": 1}]
METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


def mutated(content, rng):
    """
    :param content: A zip
    :param rng: `random.Random`, from which the damage follows
    :return: The zip after one to three kinds of damage
    """
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        try:
            content = rng.choice([_in_bytes, _in_members, _in_members, _in_members])(content, rng)
        except Exception:  # `zipfile` raises errors of many types.
            content = _in_bytes(content, rng)  # It is too damaged for anything else.
    return content


# Bytes, whatever they mean


def _in_bytes(content, rng):
    return rng.choice(BYTES)(content, rng) if content else b"PK"


def _flip(content, rng):
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 8, 64])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(content, rng):
    return content[: rng.randrange(len(content))]


def _cut(content, rng):
    start, end = sorted(rng.randrange(len(content)) for _ in range(2))
    return content[:start] + content[end:]


def _blank(content, rng):
    start = rng.randrange(len(content))
    end = min(start + rng.choice([1, 16, 512]), len(content))
    return content[:start] + bytes([rng.choice([0, 255])]) * (end - start) + content[end:]


def _insert(content, rng):
    at = rng.choice([0, len(content), rng.randrange(len(content))])
    return content[:at] + rng.randbytes(rng.choice([1, 16, 70_000])) + content[at:]


def _lie(content, rng):
    """Another number in a header: a version, a flag, a method, a checksum, a size, an offset."""
    signature = rng.choice([b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"])
    starts = [start for start in range(len(content)) if content.startswith(signature, start)]
    start = rng.choice(starts) + 4 if starts else rng.randrange(len(content))
    size, offset = rng.choice([1, 2, 4]), rng.randrange(42)
    number = rng.choice([0, 1, 8, 99, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32)]).to_bytes(4, "little")[:size]
    return content[: start + offset] + number + content[start + offset + size :]


BYTES = [_flip, _flip, _truncate, _cut, _blank, _insert, _lie, _lie]


# Members, in a zip that is whole


def _in_members(content, rng):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    if not members:
        return _in_bytes(content, rng)
    rng.choice(MEMBERS)(members, rng)
    return _zipped(members, rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, rng.choice(METHODS)]))


def _zipped(members, method):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)  # a new `ZipInfo`, as names may repeat
    return file.getvalue()


def _remove(members, rng):
    members.pop(rng.randrange(len(members)))


def _rename(members, rng):
    at = rng.randrange(len(members))
    name = members[at][0]
    others = [other for other, _ in members]
    names = [name + "x", name[1:], name.upper(), f"../{name}", f"folder/{name}", "", "predict.pth", "x.y.pth", *others]
    members[at] = (rng.choice(names), members[at][1])


def _swap(members, rng):
    one, other = rng.randrange(len(members)), rng.randrange(len(members))
    (name, content), (other_name, other_content) = members[one], members[other]
    members[one], members[other] = (name, other_content), (other_name, content)


def _duplicate(members, rng):
    name, content = rng.choice(members)
    members.insert(rng.randrange(len(members)), (name, rng.choice([content, b"", _in_bytes(content, rng)])))


def _add(members, rng):
    name = rng.choice(["foreign", "foreign.pth", "policy.pth", "folder/", "tensors.pth", "pytorch_variables.pth"])
    members.append((name, rng.choice([b"", rng.randbytes(100), rng.choice(members)[1]])))


def _replace(members, rng):
    at = rng.randrange(len(members))
    members[at] = (members[at][0], rng.choice([b"", b"{}", b"[]", b"null", b"\x80\x02}.", rng.randbytes(1000)]))


def _damage(members, rng):
    """Damage in a member, as a zip of its own if it is one, with a checksum that is right."""
    at = rng.randrange(len(members))
    name, content = members[at]
    damage = rng.choice([_in_bytes, _in_members]) if zipfile.is_zipfile(io.BytesIO(content)) else _in_bytes
    members[at] = (name, damage(content, rng))


def _edit(members, rng):
    """A change in a member that is JSON."""
    places = [at for at, (_, content) in enumerate(members) if content[:1] == b"{"]
    if not places:
        return _damage(members, rng)
    at = rng.choice(places)
    data = json.loads(members[at][1])
    for _ in range(rng.choice([1, 1, 2, 5])):
        _edit_value(data, rng)
    members[at] = (members[at][0], json.dumps(data).encode())
    return None


MEMBERS = [_remove, _rename, _swap, _duplicate, _add, _replace, *[_damage] * 3, *[_edit] * 6]


# Values in JSON


def _edit_value(data, rng):
    """Change something in a list or dictionary, at any depth."""
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(data[key], dict | list) and rng.random() < 0.6:
        return _edit_value(data[key], rng)
    kind = rng.randrange(5)
    if kind == 0:
        del data[key]
    elif kind == 1 and isinstance(data, dict):
        data[rng.choice([key + "x", "", ":serialized:", "predict", "device", "env", *keys])] = data.pop(key)
    elif kind == 2:
        other = rng.choice(keys)
        data[key], data[other] = data[other], data[key]
    elif kind == 3 and isinstance(data[key], str) and data[key]:
        text = bytearray(data[key].encode())
        text[rng.randrange(len(text))] = rng.choice(b"A/z09+=_")
        data[key] = text.decode(errors="replace")
    else:
        data[key] = rng.choice(WRONG)
    return None
