#!/usr/bin/env python3
"""Holds tokenizer_bench against Hugging Face's `tokenizers`: ids, decoded text, and MB/s of one core in one run.

    compare_tokenizers.py BENCH TEXT TOKENIZER...

TEXT: documents, each ending with a zero byte. What is not UTF-8 is given to `tokenizers` with errors="replace".
"""
import os, struct, subprocess, sys, tempfile, time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tokenizers


def theirs(path, documents):
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    begin = time.perf_counter()
    ids = [tokenizer.encode(d, add_special_tokens=False).ids for d in documents]
    seconds = time.perf_counter() - begin
    return ids, [tokenizer.decode(i, skip_special_tokens=False) for i in ids], seconds


def ours(bench, text, path):
    with tempfile.TemporaryDirectory() as there:
        ids_file, decoded_file = os.path.join(there, "ids"), os.path.join(there, "decoded")
        said = subprocess.run([bench, path, text, ids_file, decoded_file], capture_output=True, text=True)
        if said.returncode != 0:
            raise SystemExit(f"{path}: {said.stdout}{said.stderr}")
        raw, ids, at = open(ids_file, "rb").read(), [], 0
        while at < len(raw):
            count = struct.unpack_from("<i", raw, at)[0]
            ids.append(list(struct.unpack_from(f"<{count}i", raw, at + 4)))
            at += 4 + 4 * count
        decoded = [d.decode() for d in open(decoded_file, "rb").read().split(b"\0")[:-1]]
        return ids, decoded, said.stdout.strip()


def main():
    bench, text = sys.argv[1:3]
    raw = open(text, "rb").read()
    documents = [d.decode(errors="replace") for d in raw.split(b"\0")[:-1]]
    bad = 0
    for path in sys.argv[3:]:
        their_ids, their_text, seconds = theirs(path, documents)
        our_ids, our_text, speed = ours(bench, text, path)
        different = [i for i in range(len(documents)) if our_ids[i] != their_ids[i]]
        decoded = [i for i in range(len(documents)) if our_text[i] != their_text[i]]
        print(f"{path}: {len(different)} of {len(documents)} documents have other ids, {len(decoded)} another text; "
              f"{speed}; theirs {len(raw) / 1e6 / seconds:.2f} MB/s", flush=True)
        for i in different[:1]:
            at = next((k for k, (a, b) in enumerate(zip(our_ids[i], their_ids[i])) if a != b), 0)
            print("  document", i, "token", at, our_ids[i][max(0, at - 3):at + 6], "theirs",
                  their_ids[i][max(0, at - 3):at + 6], repr(tokenizers.Tokenizer.from_file(path).decode(their_ids[i][max(0, at - 3):at + 6])))
        for i in decoded[:1]:
            at = next((k for k, (a, b) in enumerate(zip(our_text[i], their_text[i])) if a != b), 0)
            print("  document", i, "text", repr(our_text[i][max(0, at - 20):at + 20]), "theirs",
                  repr(their_text[i][max(0, at - 20):at + 20]))
        bad += bool(different or decoded)
    return 1 if bad else 0


sys.exit(main())
