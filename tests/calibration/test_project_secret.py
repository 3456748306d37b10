import stat

import numpy as np
import pytest

from conformal_arbitrage import ConfigError, ProjectSecret, ScoreLog, calibrate
from conformal_arbitrage.calibration.secret import FILE, draws, subkey, user_folder


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch, tmp_path):
    """A user without any secret, in a folder of a project."""
    monkeypatch.delenv("ARBITRAGE_SECRET", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    (tmp_path / "project" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "runs")


def test_a_folder_gets_one_secret_that_only_its_owner_reads(tmp_path):
    folder = tmp_path / "project"
    first = ProjectSecret.create(folder)
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    assert {path.name for path in folder.iterdir()} == {FILE, "runs"}
    assert ProjectSecret.create(folder) == first == ProjectSecret.find() == ProjectSecret.search()
    assert first.keys[0].decode() not in repr(first)


def test_two_processes_that_create_a_secret_at_once_agree(tmp_path, monkeypatch):
    from conformal_arbitrage.calibration import secret as project_secret

    folder = tmp_path / "new"
    real = project_secret.write_bytes

    def overtaken(path, data, *, private):
        real(path, data, private=private)
        if not (folder / FILE).exists():
            (folder / FILE).write_text("the-secret-of-the-other-process")

    monkeypatch.setattr(project_secret, "write_bytes", overtaken)
    assert ProjectSecret.create(folder).keys == (b"the-secret-of-the-other-process",)
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_the_environment_comes_first_and_may_hold_several(tmp_path, monkeypatch):
    ProjectSecret.create(tmp_path)
    monkeypatch.setenv("ARBITRAGE_SECRET", "the-new-secret-of-us, the-old-secret-of-us,")
    secret = ProjectSecret.find()
    assert secret.keys == (b"the-new-secret-of-us", b"the-old-secret-of-us")
    assert (secret.id, len(set(secret.fingerprints))) == (secret.fingerprints[0], 2)


def test_the_nearest_file_upwards_comes_next_and_the_users_last(tmp_path, caplog):
    assert ProjectSecret.search() is None
    users = ProjectSecret.find()
    path = tmp_path / "user" / "conformal-arbitrage" / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    [said] = caplog.messages
    assert str(path) in said
    assert users.id in said
    assert ProjectSecret.find() == ProjectSecret.search() == users
    assert len(caplog.messages) == 1
    assert user_folder() == path.parent
    above, project = ProjectSecret.create(tmp_path), ProjectSecret.create(tmp_path / "project")
    assert len({users.id, above.id, project.id}) == 3
    assert ProjectSecret.find() == project
    (tmp_path / "project" / FILE).unlink()
    assert ProjectSecret.find() == above


@pytest.mark.parametrize("text", ["short", "long-enough-for-one,short", " , "])
def test_a_secret_that_can_be_guessed_is_refused(text):
    with pytest.raises(ConfigError, match="TEST: a secret has 16 characters or more"):
        ProjectSecret.from_text(text, source="TEST")


def test_an_unreadable_or_unwritable_secret_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    (tmp_path / FILE).write_bytes(b"\xff\xfe not text")
    with pytest.raises(ConfigError, match=r"cannot be read .*set ARBITRAGE_SECRET"):
        ProjectSecret.find()
    (tmp_path / FILE).unlink()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be created .*set ARBITRAGE_SECRET"):
        ProjectSecret.find()


def test_subkeys_and_fingerprint_differ_by_purpose_and_do_not_reveal_the_secret():
    secret = ProjectSecret((b"one-secret-of-a-project",))
    keys = {subkey(secret.keys[0], purpose) for purpose in ("boundary v1", "signing v1", "audit v1", "digest v1")}
    assert len(keys) == 4
    assert secret.boundary_key in keys
    assert bytes.fromhex(secret.id) not in {key[:16] for key in keys}
    assert len(secret.id) == 32


def test_a_document_is_verified_with_every_secret_of_a_rotation():
    old, new = ProjectSecret((b"the old secret",)), ProjectSecret((b"the new secret", b"the old secret"))
    assert new.verifies(b"document", old.sign(b"document"))
    assert not old.verifies(b"document", new.sign(b"document"))
    assert not new.verifies(b"another", old.sign(b"document"))


def test_draws_depend_on_the_secret_and_the_id_alone():
    """Not on the log, its scores, the order of its rows, or the run."""
    rng = np.random.default_rng(0)
    key = ProjectSecret((b"one secret",)).boundary_key
    log = ScoreLog.from_arrays(rng.random((50, 2)), rng.random((50, 2)), id=[f"q{k}" for k in range(50)])
    order = rng.permutation(50)
    other = ScoreLog.from_arrays(rng.random((50, 3)), rng.random((50, 3)), id=log.id[order])
    assert np.array_equal(draws(key, log)[order], draws(key, other))
    one, again = (calibrate(log, 0.2, boundary="random", key=key) for _ in range(2))
    assert (one.relaxation, one.boundary_u, one.provenance.key_sha256) == (
        again.relaxation,
        again.boundary_u,
        again.provenance.key_sha256,
    )
