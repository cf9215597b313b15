"""The transformer's text: the same on every run, held out in part, and split over groups."""

from __future__ import annotations

from pathlib import Path

import data
import numpy as np
import parallel
import pytest


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return data.load_corpus()


def test_corpus_is_python_and_holds_some_files_out(corpus: data.Corpus) -> None:
    assert len(corpus.training) > 3_000_000
    assert 0.01 < len(corpus.validation) / len(corpus.training) < 0.2
    training, validation = corpus.training.tobytes(), corpus.validation.tobytes()
    for text in (training, validation):
        assert text.count(b"\n    def ") > 300
    assert validation[1000:1200] not in training
    assert data.load_corpus().digest == corpus.digest


def test_folder_without_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass")
    with pytest.raises(FileNotFoundError, match="has 1 Python files and at least 20 are needed"):
        data.load_corpus(tmp_path)


def test_tests_of_the_library_are_left_out(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.py").write_text(f"x{number}")
    before = data.load_corpus(tmp_path).digest
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "much.py").write_text("assert")
    assert data.load_corpus(tmp_path).digest == before


def test_batches_follow_from_seed_and_step(corpus: data.Corpus) -> None:
    batch = data.training_batch(corpus, 7, 4, 32, seed=1)
    assert batch.tokens.shape == batch.targets.shape == (4, 32)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.tokens[2].astype(np.uint8).tobytes() in corpus.training.tobytes()
    again, later, other = (
        data.training_batch(corpus, step, 4, 32, seed) for step, seed in ((7, 1), (8, 1), (7, 2))
    )
    np.testing.assert_array_equal(batch.tokens, again.tokens)
    assert (batch.tokens != later.tokens).any() and (batch.tokens != other.tokens).any()


def test_validation_covers_the_text_without_overlap(corpus: data.Corpus) -> None:
    batches = [data.validation_batch(corpus, index, 3, 4, 32) for index in range(3)]
    rows = np.concatenate([batch.tokens for batch in batches])
    assert len(np.unique(rows, axis=0)) == 12
    assert (batches[0].tokens[0] == corpus.validation[:32]).all()
    assert (batches[2].targets[-1] == corpus.validation[-32:]).all()


def test_each_group_gets_its_own_sequences(corpus: data.Corpus) -> None:
    mesh = parallel.make_mesh(2, 2)
    tokens = data.training_batch(corpus, 0, 4, 32, seed=0).tokens
    rows = parallel.put_rows(mesh, tokens)
    for shard in rows.addressable_shards:
        group, member = (int(i[0]) for i in np.nonzero(mesh.devices == shard.device))
        own = tokens[2 * group : 2 * group + 2].reshape(2, -1)[member]
        np.testing.assert_array_equal(shard.data, own)
