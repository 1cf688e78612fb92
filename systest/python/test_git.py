"""The SDK's git helper, which is commands underneath."""

import pytest
from e2b import CommandExitException


@pytest.fixture
def repo(sbx, place):
    sbx.git.init(place, initial_branch="main")
    sbx.git.configure_user("A Name", "a@example.test", scope="local", path=place)
    return place


def test_commit_branches_and_status(sbx, repo):
    sbx.files.write(f"{repo}/f", "1")
    status = sbx.git.status(repo)
    assert [f.name for f in status.file_status] == ["f"] and status.current_branch == "main"
    sbx.git.add(repo)
    sbx.git.commit(repo, "first; $(not run)")
    assert sbx.git.status(repo).is_clean
    assert sbx.commands.run("git log --format=%s%an", cwd=repo).stdout == "first; $(not run)A Name\n"
    sbx.git.create_branch(repo, "feature")
    branches = sbx.git.branches(repo)
    assert branches.current_branch == "feature" and set(branches.branches) == {"feature", "main"}
    sbx.git.checkout_branch(repo, "main")
    sbx.git.delete_branch(repo, "feature")
    assert sbx.git.branches(repo).branches == ["main"]


def test_clone_and_push(sbx, repo, place):
    sbx.files.write(f"{repo}/f", "1")
    sbx.git.add(repo)
    sbx.git.commit(repo, "one")
    sbx.commands.run(f"git clone -q --bare {repo} {repo}-bare.git")
    sbx.git.remote_add(repo, "origin", f"{repo}-bare.git")
    assert sbx.git.remote_get(repo, "origin") == f"{repo}-bare.git"
    sbx.files.write(f"{repo}/g", "2")
    sbx.git.add(repo)
    sbx.git.commit(repo, "two")
    sbx.git.push(repo, remote="origin", branch="main", set_upstream=True)
    sbx.git.clone(f"{repo}-bare.git", path=f"{repo}-clone")
    assert sbx.files.read(f"{repo}-clone/g") == "2"


def test_config_and_failure(sbx, repo):
    sbx.git.set_config("pull.rebase", "false", scope="local", path=repo)
    assert sbx.git.get_config("pull.rebase", scope="local", path=repo) == "false"
    with pytest.raises(CommandExitException):
        sbx.git.checkout_branch(repo, "no-such-branch")
