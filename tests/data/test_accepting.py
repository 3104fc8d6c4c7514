"""What engines tell of their rounds, each in its own way, and what is said of an engine that does not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headstart.data import accepted
from headstart.data.accepted import Accepting, Answered, summed
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.reports.figures import acceptance
from headstart.inference.serving.serve import application
from headstart.inference.speculator import load_attached
from tests.doors import call
from tests.drafters import make
from tests.fake_engine import serving

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [40, 2, 6]]
Handler = Callable[[dict[str, Any]], Any]


@contextlib.contextmanager
def asking(url: str) -> Iterator[Accepting]:
    with contextlib.closing(Accepting(url, None, None)) as engine:
        yield engine


@contextlib.contextmanager
def engine_of(**paths: Handler) -> Iterator[Accepting]:
    """A connection to an engine that answers with JSON, or with text, at these paths (``__`` stands for /)."""
    with serving(stand_in(**paths)) as url, asking(url) as engine:
        yield engine


def stand_in(**paths: Handler) -> web.Application:
    def handler(answer: Handler) -> Any:
        async def handle(request: web.Request) -> web.Response:
            said = answer(json.loads(await request.text() or "{}"))
            return web.Response(text=said) if isinstance(said, str) else web.json_response(said)

        return handle

    app = web.Application()
    served: dict[str, Handler] = {"v1__models": lambda body: {"data": [{"id": "toy"}]}, **paths}
    app.add_routes([web.route("*", f"/{path.replace('__', '/')}", handler(answer)) for path, answer in served.items()])
    return app


class Vllm:
    """Counts as vLLM 0.32 does. ``others``: tokens of other requests; ``late``: looks at its sums before an answer is in them."""

    def __init__(self, others: int = 0, late: int = 0, tokens: Any = (1, 2, 3, 4, 5, 6)) -> None:
        self.others, self.late, self.tokens = others, late, tokens
        self.sums, self.asked, self.looked = (0.0, 0.0, 0.0, 0.0), list[dict[str, Any]](), 0

    def complete(self, body: dict[str, Any]) -> Any:
        self.asked.append(body)
        more = (float(len(self.tokens or ()) + self.others), 2.0, 2.0, 1.0)
        self.looked, self.next = 0, tuple(a + b for a, b in zip(self.sums, more, strict=True))
        return {"choices": [{"text": "", "finish_reason": "length", "token_ids": self.tokens and list(self.tokens)}]}

    def metrics(self, body: dict[str, Any]) -> str:
        self.looked += 1
        if self.asked and self.looked > self.late:
            self.sums = self.next  # type: ignore[assignment]
        tokens, drafts, first, second = self.sums
        pos = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a b",position='
        return (f"# HELP vllm:generation_tokens_total x\n# TYPE vllm:generation_tokens_total counter\n"
                f'vllm:generation_tokens_total{{engine="0",model_name="a b"}} {tokens}\n'
                f'vllm:generation_tokens_created{{engine="0",model_name="a b"}} 1.79e+09\n'
                f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="a b"}} {drafts}\n'
                f'{pos}"0"}} {first}\n{pos}"1"}} {second}\n')  # fmt: skip

    def opened(self) -> Any:
        return engine_of(metrics=self.metrics, v1__completions=self.complete)


def test_the_endpoint_here_counts_the_rounds_that_it_takes(target: Any) -> None:
    drafter, chain = make("eagle", target), TreePolicy("chain", depth=3)
    app = application(target, drafter, plans=chain, sequences=2, max_length=128, name="toy")
    with serving(app) as url, asking(url) as engine:
        assert (engine.engine, engine.guesses) == ("Headstart", 3)
        for prompt in PROMPTS:
            own = generate(target, Drafting(drafter), prompt, new_tokens=24, policy=chain)
            found = engine.answer(prompt, 24, target.stop_ids)
            assert (found.prompt, found.tokens, found.rounds) == (prompt, own.tokens, len(own.emitted)) and found.seconds > 0
            by_depth = acceptance([own], 3)["acceptance_by_depth"] if own.emitted else []
            shares = [n / max(found.rounds, 1) for n in found.accepted]
            assert shares == pytest.approx(by_depth[: len(shares)]) and not any(by_depth[len(shares) :])
        with asking(url.removesuffix("/v1") + "/") as same:
            assert same.answer(PROMPTS[0], 24, target.stop_ids)[:4] == engine.answer(PROMPTS[0], 24, target.stop_ids)[:4]
        with pytest.raises(UserError, match="our endpoint draws its guesses above temperature 0"):
            engine.answer(PROMPTS[0], 24, target.stop_ids, 0.5)


@pytest.mark.parametrize(
    ("plans", "words"),
    [(TreePolicy(depth=3, nodes=6), "drafts trees, or what pays, and chains are compared: start it with decode=chain"),
     (None, "this endpoint does not draft: start it with the drafter")],
)  # fmt: skip
def test_the_endpoint_here_says_what_it_drafts(target: Any, plans: Any, words: str) -> None:
    app = application(target, make("eagle", target), plans=plans, sequences=2, max_length=128, name="toy")
    with serving(app) as url, pytest.raises(UserError, match=words), asking(url):
        pass


def test_an_engine_that_does_not_say_its_guesses_is_asked_to_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(tmp_path)
    with serving(stand_in(**llama_cpp({"predicted_n": 6, "draft_n": 9, "draft_n_accepted": 2}))) as url:
        assert call("inference", ["diagnose", *WORDS, f"url={url}"], tmp_path, monkeypatch) == 2
    assert "llama.cpp does not say how many guesses a round has: give guesses=N" in capsys.readouterr().err


def test_sums_are_read_before_and_after_an_answer() -> None:
    vllm = Vllm(late=3)
    with vllm.opened() as engine:
        assert (engine.engine, engine.guesses) == ("vLLM", 2)
        for _ in range(2):
            found = engine.answer([3, 4], 6, [0], 0.7)
            assert found._replace(seconds=0.0) == Answered([3, 4], [1, 2, 3, 4, 5, 6], 2, [2, 1], 0.0)
        assert engine.session.connector is not None and engine.session.connector.force_close, "what is idle while we decode is closed"
    asked = {"prompt": [3, 4], "max_tokens": 6, "temperature": 0.7, "stop_token_ids": [0], "return_token_ids": True}
    assert len(vllm.asked) == 2 and asked.items() <= vllm.asked[0].items()


def test_sums_of_several_engines_are_added_up() -> None:
    text = 'a_total{engine="0",at="1"} 2.0\na_total{engine="1",at="1"} 3\na_total{engine="1",at="0"} 4e1\nb 7\na_total_more{at="1"} 9\n'
    assert summed(text, "a_total") == {"": 45.0} and summed(text, "a_total", "at") == {"1": 5.0, "0": 40.0}
    assert summed(text, "b") == {"": 7.0} and summed(text, "c") == {}
    exemplar = 'a_total{at="1"} 5 # {trace="}"} 0.67 179589\n'
    assert summed(exemplar, "a_total", "at") == {"1": 5.0}
    odd = 'a_total{at="}"} 3\na_total NaN\na_total +Inf\na_total -1\na_total x\na_total{at="1"} 2.5e+01 1795896011\n'
    assert summed(odd, "a_total") == {"": 28.0}


@pytest.mark.parametrize("where", ["server_info", "get_server_info"])
def test_sglang_tells_the_rounds_of_an_answer(where: str) -> None:
    asked = list[dict[str, Any]]()

    def answer(body: dict[str, Any]) -> Any:
        asked.append(body)
        about = {"completion_tokens": 6, "spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 1, 0, 1]}
        return {"text": "", "output_ids": [1, 2, 3, 4, 5, 6], "meta_info": about}

    about = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    with engine_of(**{where: lambda body: about}, generate=answer) as engine:
        assert (engine.engine, engine.guesses) == ("SGLang", 3)
        assert engine.answer([3, 4], 6, [0])[:4] == ([3, 4], [1, 2, 3, 4, 5, 6], 3, [2, 1, 1])
    assert asked == [{"input_ids": [3, 4], "sampling_params": {"temperature": 0, "max_new_tokens": 6, "stop_token_ids": [0]}}]


def llama_cpp(timings: dict[str, Any]) -> dict[str, Handler]:
    tokens = list(range(1, 1 + timings["predicted_n"]))
    return {
        "props": lambda body: {"default_generation_settings": {}},
        "completion": lambda body: {"tokens": tokens, "timings": timings},
    }


def test_llama_cpp_tells_the_accepted_guesses_of_an_answer() -> None:
    with engine_of(**llama_cpp({"predicted_n": 6, "draft_n": 9, "draft_n_accepted": 2})) as engine:
        assert (engine.engine, engine.guesses) == ("llama.cpp", None)
        assert engine.answer([3, 4], 6, [0])[:4] == ([3, 4], [1, 2, 3, 4, 5, 6], 3, [])
    with engine_of(**llama_cpp({"predicted_n": 2})) as engine:
        assert engine.answer([3, 4], 2, [0]).rounds == 1, "too short to guess"


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ({"metrics": lambda body: "vllm:generation_tokens_total 3\n"}, "this vLLM does not draft"),
        ({"server_info": lambda body: {"speculative_algorithm": None}}, "this SGLang does not draft"),
        ({"server_info": lambda body: {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}}, "start it with .*-topk 1"),
        (llama_cpp({"predicted_n": 6}), "this llama.cpp does not draft"),
        ({"metrics": lambda body: "some 3\n", "props": lambda body: "no JSON"}, "no vLLM, SGLang, llama.cpp or"),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_draft_is_told(paths: dict[str, Handler], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught, engine_of(**paths) as engine:
        engine.answer([3, 4], 6, [0])
    assert str(caught.value).startswith("url=http://127.0.0.1:")


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        (Vllm(others=200), "answers others at the same time"),
        (Vllm(others=3), "answers others at the same time"),
        (Vllm(tokens=range(1, 8)), "7 tokens came where at most 6 were asked for"),
        (Vllm(tokens=[1, 2]), "2 rounds are counted for 2 tokens: it does not draft, was restarted"),
        (Vllm(late=10**9), "its /metrics does not count the answer"),
        (Vllm(tokens=None), "vLLM answers without tokens and rounds"),
        (Vllm(tokens=[1, "2"]), "no list of tokens"),
    ],
)
def test_sums_that_are_not_an_answers_are_refused(vllm: Vllm, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepted, "LATE", 0.1)
    with pytest.raises(UserError, match=words), vllm.opened() as engine:
        engine.answer([3, 4], 6, [0])


@pytest.mark.parametrize(
    ("rounds", "words"),
    [(0, "0 rounds are counted for 6 tokens"), (-3, "-3 rounds are counted"), (float("inf"), "answers without tokens and rounds")],
)
def test_rounds_that_cannot_be_are_refused(rounds: Any, words: str) -> None:
    answer = {"output_ids": [1, 2, 3, 4, 5, 6], "meta_info": {"spec_verify_ct": rounds}}
    about = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 4}
    with engine_of(server_info=lambda body: about, generate=lambda body: answer) as engine, pytest.raises(UserError, match=words):
        engine.answer([3, 4], 6, [0])


def test_a_key_that_is_missing_and_a_failure_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(error: type[web.HTTPException]) -> Handler:
        def answer(body: dict[str, Any]) -> Any:
            raise error

        return answer

    with (
        pytest.raises(UserError, match=r"/metrics wants a key \(status 401\): key=VARIABLE"),
        engine_of(metrics=refused(web.HTTPUnauthorized)),
    ):
        pass
    monkeypatch.setattr("headstart.data.endpoint.FIRST", 0.001)
    vllm = Vllm()
    monkeypatch.setattr(vllm, "complete", refused(web.HTTPServiceUnavailable))
    with vllm.opened() as engine, pytest.raises(UserError) as caught:
        engine.answer([3, 4], 6, [0])
    assert str(caught.value).endswith("/v1 failed: status 503: 503: Service Unavailable"), "at once: it is not repeated"


WORDS = [f"speculator={ROOT}/assets/tiny_eagle", f"target.path={ROOT}/assets/tiny", "target.dtype=float32", "target.device=cpu",
         "prompts=asked.jsonl", "new_tokens=16"]  # fmt: skip


def ask(place: Path) -> None:
    texts = ["def area(width, height):\n", "import os\n\n", "class Stack:\n    def __init__(self"]
    (place / "asked.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_the_command_holds_the_served_length_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headstart.inference.decoding.target import Target

    target = Target.load(str(ROOT / "assets" / "tiny"), dtype="float32", device="cpu")
    drafter = load_attached(ROOT / "assets" / "tiny_eagle", target)
    ask(tmp_path)
    with serving(application(target, drafter, plans=TreePolicy("chain", depth=4), sequences=1, max_length=128)) as url:
        assert call("inference", ["diagnose", *WORDS, f"url={url}"], tmp_path, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "chain of 4 by Headstart at temperature 0: served " in said and "as many rounds in 3 of 3 answers" in said
    assert "THEY PART" not in said and "acceptance by depth, served: " in said and "none of the known causes was found" in said


def test_answers_of_a_single_token_have_no_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(tmp_path)
    about = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 4}
    answer = {"output_ids": [0], "meta_info": {"spec_verify_ct": 0}}
    with serving(stand_in(server_info=lambda body: about, generate=lambda body: answer)) as url:
        assert call("inference", ["diagnose", *WORDS, f"url={url}"], tmp_path, monkeypatch) == 2
    assert "answers all prompts with a single token" in capsys.readouterr().err


def test_guesses_and_key_belong_to_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ask(tmp_path)
    for word in ("guesses=4", "key=HOME", "model=toy", "temperature=1"):
        assert call("inference", ["diagnose", *WORDS, word], tmp_path, monkeypatch) == 2
        assert f"{word.partition('=')[0]} belongs to url=: give url too, or leave it out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("HEADSTART_VLLM"), reason="HEADSTART_VLLM does not name a Python with vLLM")
def test_a_real_vllm_takes_our_rounds_until_it_is_given_another_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(tmp_path)
    with real_vllm(tmp_path / "draft", {}) as url:
        assert call("inference", ["diagnose", *WORDS, f"url={url}"], tmp_path, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "chain of 5 by vLLM" in said and "as many rounds in 3 of 3 answers" in said and "THEY PART" not in said
    with real_vllm(tmp_path / "other", {"norm_output": False}) as url:
        assert call("inference", ["diagnose", *WORDS, f"url={url}"], tmp_path, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "the engine computes the drafter otherwise" in said and "with norm_output=false, it has" in said


@contextlib.contextmanager
def real_vllm(folder: Path, change: dict[str, Any]) -> Iterator[str]:
    """vLLM's server with the shipped target and drafter, the settings of which are changed."""
    folder.mkdir()
    for file in (ROOT / "assets" / "tiny_eagle").glob("*.*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    drafting = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 5})
    command = [os.environ["HEADSTART_VLLM"], "-m", "vllm.entrypoints.openai.api_server", "--model", str(ROOT / "assets" / "tiny"),
               "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
               "--speculative-config", drafting]  # fmt: skip
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True)
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            time.sleep(0.5)
        else:
            pytest.fail((folder / "log").read_text()[-2000:])
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
        process.wait()
