"""Command lines that no door may take: each ends in one line that begins with "error:" and names what is wrong, exit code 2, before a
target is loaded, and with nothing written.

``python -m pytest tests/test_hostile.py`` runs all of them within one process; a benchmark may run them as a user does.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EAGLE, FILE, FOLDER = ROOT / "assets" / "tiny_eagle", ROOT / "LICENSE", ROOT / "conf"
LONG, ENTRY = "x" * 300, {"train": [str(ROOT / "train.py")], "data": ["-m", "data"], "inference": ["-m", "inference"]}


class Hostile(NamedTuple):
    door: str  # train, data, data regenerate, inference, inference tune, inference chat, inference serve
    arguments: list[str]
    says: str  # what the line must name

    @property
    def command(self) -> list[str]:
        """For python, in any folder, with the checkout in PYTHONPATH."""
        first, *command = self.door.split()
        return [*ENTRY[first], *command, *self.arguments]


# Of every door: all of them are tried with one, a few with each of the others.
COMMON = """
--config-name=nosuch                   --config-name
--config-path=/nosuch                  --config-path
--config-dir=/nosuch                   /nosuch
--experimental-rerun=/nosuch           --experimental-rerun
--nosuch                               --nosuch
--cfg=nosuch                           --cfg
--resolve                              --resolve
nosuch=1                               nosuch
+nosuch=1                              nosuch
++target.nosuch=1                      target.nosuch
~target                                ~target
=                                      =
[                                      [
target=nosuch                          nosuch
target=null                            target=null
target=                                target=
target=[tiny,folder]                   target
+target=tiny                           target
target=folder                          target.path
target.dtpye=float32                   target.dtype
target.dtype=float31                   float32
target.dtype=null                      target.dtype
target.attention=fast                  target.attention
target.device=null                     target.device
target.device=[cpu]                    target.device
target.path=null                       target.path
target.path=''                         target.path
target.path=true                       target.path
target.name=LONG                       target.name
target.path=/tmp/LONG                  target.path
target.config=5                        target.config
target.config={}                       model_type
++target.drafter.hedas=2               heads
target.path=${nosuch}                  nosuch
target.path=${oc.env:NO_SUCH_NAME}     NO_SUCH_NAME
target.path=${                         target.path
"""
LINES = {
    "train": """
out=''                                 out
out=null                               out
out=[a]                                out
out=true                               out
out=1.5                                out
out=LONG                               out
out=~nobody-of-that-name/a             out
out=a/LONG/b                           out
out=FILE                               out
out=FILE/below                         out
out=/dev/null/run                      out
out=/proc/nosuch                       out
out=${head.nosuch}                     head.nosuch
head=eagel                             eagle
head=null                              head
head=[                                 head
head=[eagle,eagle]                     eagle
head=[eagle,nosuch]                    nosuch
head=[eagle,mtp] arms={a:'head=mtp'}   arms
head@other=eagle                       head
head.layers=many                       head.layers
head.layers=null                       head.layers
head.layers=-1                         head.layers
head.layers=1.5                        head.layers
head.heads=0                           head.heads
head.taps=[]                           head.taps
head.taps=5                            head.taps
head.taps=[a]                          head.taps
head.draft_vocab=0                     head.draft_vocab
head.draft_vocab=[]                    head.draft_vocab
head.nosuch=1                          head.nosuch
+head.nosuch=1                         nosuch
head.name=nosuch                       nosuch
head=draft_lm head.folder=7            head.folder
loss=nosuch                            loss
loss.depth=0                           loss.depth
loss.depth=two                         loss.depth
loss.terms.kl=0                        loss.terms
loss.terms.kl=-1                       loss.terms.kl
loss.terms.kl=nan                      loss.terms.kl
loss.terms.kl=null                     loss.terms.kl
loss.terms.kl=true                     loss.terms.kl
loss.terms=null                        loss.terms
loss.terms=[kl]                        loss.terms
+loss.terms.kll=1                      kll
loss=top_k loss.terms.kl=0 loss.terms.top_k=0       loss.terms
loss.decay=-1                          loss.decay
loss.decay=inf                         loss.decay
loss.weighting=chian                   chain
loss.base_until=2                      loss.base_until
loss.chunk=0                           loss.chunk
loss.on_policy=5                       loss.on_policy
loss=on_policy_samples loss.on_policy.share=1       loss.on_policy.share
loss=on_policy_samples loss.on_policy.new_tokens=2  loss.on_policy.new_tokens
loss=on_policy_samples +loss.terms.data_ce=1        data_ce
trainer=nosuch                         trainer
trainer.stepz=3                        trainer.steps
trainer.steps=0                        trainer.steps
trainer.steps=many                     trainer.steps
trainer.steps=true                     trainer.steps
trainer.steps=1e3                      trainer.steps
trainer.rows=0                         trainer.rows
trainer.length=null                    trainer.length
trainer.accumulate=0                   trainer.accumulate
trainer.optimizer=muno                 muon
trainer.optimizer=null                 trainer.optimizer
trainer.lr=0                           trainer.lr
trainer.lr=-1e-3                       trainer.lr
trainer.lr=nan                         trainer.lr
trainer.lr=fast                        trainer.lr
trainer.betas=[0.9]                    trainer.betas
trainer.betas=[0.9,1.0]                trainer.betas
trainer.betas=0.9                      trainer.betas
trainer.weight_decay=-1                trainer.weight_decay
trainer.warmup=-1                      trainer.warmup
trainer.schedule=linear                trainer.schedule
trainer.clip=-1                        trainer.clip
trainer.precision=fp8                  trainer.precision
trainer.seed=-1                        trainer.seed
trainer.seed=4294967296                trainer.seed
trainer.save_every=0                   trainer.save_every
trainer.keep=0                         trainer.keep
trainer.eval_every=0                   trainer.eval_every
trainer.resume=maybe                   trainer.resume
trainer.start=nosuch                   trainer.start
trainer.start=''                       trainer.start
trainer.start=5                        trainer.start
trainer.start=FOLDER                   trainer.start
trainer.lora=5                         trainer.lora
trainer.lora={rank:4}                  trainer.lora
+trainer.turbo=true                    trainer.turbo
data=nosuch                            data
data=null                              data
data.name=nosuch                       data.name
data=chat                              path
data=chat path=null                    path
data=chat path=''                      path
data=chat path=5                       path
data=chat path=nosuch.jsonl            nosuch.jsonl
data=chat path=/nosuch/file            /nosuch/file
data=chat path=./nosuch                ./nosuch
data=chat path=LONG                    path
data=chat path=[a,b]                   path
data=chat path=FILE data.on_bad=ignore   data.on_bad
data=chat path=FILE data.split=null    data.split
data=regenerated path=nosuch           nosuch
path=FILE                              data=chat
+path=FILE                             data=chat
data=chat path=FILE data.path=other    path
data=shards path=nosuch                nosuch
data=shards path=FOLDER data.prompts_file=nosuch    index.json
data=text path=FOLDER data.on_bad=ignore            data.on_bad
data=text path=nosuch.txt              nosuch.txt
decode=nosuch                          decode
decode.kind=tree                       decode.kind
decode.kind=chain decode.rule=nosuch   decode.rule
decode.rule=block                      block
decode.depth=0                         decode.depth
decode.nodes=-1                        decode.nodes
decode.branch=0                        decode.branch
decode.least=1                         decode.least
decode.paths=7                         decode.paths
decode.paths=[1]                       decode.paths
decode=fixed decode.paths=[]           paths
decode=chain decode.paths=[[0]]        decode.paths
decode=fixed decode.paths=[[1]]        path
decode=fixed decode.paths=nosuch.json  nosuch.json
decode=fixed decode.paths=FILE         LICENSE
decode=ngram                           decode
decode.proposer=null                   decode.proposer
decode.proposer.kind=ngarm             ngram
decode.top_k=-1                        decode.top_k
decode.top_p=0                         decode.top_p
decode.top_p=1.5                       decode.top_p
decode.min_p=1                         decode.min_p
decode.repetition_penalty=0            decode.repetition_penalty
decode.prompts=0                       decode.prompts
decode.new_tokens=null                 decode.new_tokens
decode.seed=-1                         decode.seed
decode.seed=9223372036854775808        decode.seed
decode.tuned=5                         decode.tuned
export=nosuch                          export
export.dtype=int8                      export.dtype
tracker=nosuch                         tracker
tracker.kind=nosuch                    tracker.kind
launcher.processes=0                   launcher.processes
launcher.processes=null                launcher.processes
launcher=nosuch                        launcher
experiment=nosuch                      experiment
experiment=null                        experiment
arms=5                                 arms
arms=[a,b]                             arms
arms={}                                arms
arms={a:null}                          arms.a
arms={a:5}                             arms.a
arms={a:'head=eagel'}                  arm a
arms={a:'trainer.lr=0'}                arm a
arms={a:'decode.depth=2'}              arm a
arms={a:"'"}                           arms.a
arms={a/b:'head=eagle'}                a/b
arms={..:'head=eagle'}                 ..
arms={LONG:'head=eagle'}               arms
target.device=tp                       target.device
hydra/launcher=nosuch                  launcher
hydra.mode=5                           hydra.mode
hydra.run.dir=/proc/nosuch             hydra.run.dir
--multirun trainer.lr=0,0                trainer.lr
--multirun trainer.steps=0 trainer.lr=1e-3,2e-3     trainer.steps
--multirun head=eagle,nosuch           nosuch
--multirun trainer.seed=0,1 decode.depht=3          decode.depth
--multirun trainer.lr=choice(          --multirun
--multirun                             --multirun
--multirun head=glob(nosuch*)          --multirun
--multirun trainer.lr=interval(1,2)    sweep
-m -r trainer.lr=1,2                   --multirun
trainer.lr=1,2                         trainer.lr
""",
    "data": """
nosuch                                 nosuch
regenrate                              regenerate
out=null                               out
out=''                                 out
out=FILE                               out
out=LONG                               out
rows=0                                 rows
rows=null                              rows
length=0                               length
length=x                               length
seed=-1                                seed
taps=5                                 taps
taps=[]                                taps
taps=[2,a]                             taps
taps=[-1]                              taps
head=eagel                             eagle
head.layers=0                          head.layers
data=chat path=nosuch.jsonl            nosuch.jsonl
data=shards path=nosuch                nosuch
target.device=tp                       target.device
""",
    "data regenerate": """
out=null                               out
out=FOLDER                             out
out=FILE/below                         out
turns=some                             turns
prefix=0                               prefix
new_tokens=0                           new_tokens
temperature=-1                         temperature
temperature=nan                        temperature
top_p=0                                top_p
top_k=-1                               top_k
seed=-1                                seed
limit=0                                limit
limit=all                              limit
rows=0                                 rows
capacity=1                             capacity
retries=-1                             retries
speculator=nosuch                      speculator
speculator=FILE                        speculator
speculator=FOLDER                      speculator
url=localhost                          url
url=5                                  url
url=http://127.0.0.1:9/v1 speculator=EAGLE          speculator
data=nosuch                            data
data=chat path=nosuch.jsonl            nosuch.jsonl
data=regenerated path=FILE             data
target.device=tp                       target.device
""",
    "inference": """
report                                 report
serv                                   serve
speculator=EAGLE                       prompts
speculator=EAGLE prompts=null          prompts
speculator=EAGLE prompts=nosuch        nosuch
speculator=EAGLE prompts=FOLDER        prompts
speculator=EAGLE prompts=LONG          prompts
speculator=EAGLE prompts=[a]           prompts
prompts=FILE                           speculator
speculator=nosuch prompts=FILE         speculator
speculator=FILE prompts=FILE           speculator
speculator=FOLDER prompts=FILE         speculator
speculator=LONG prompts=FILE           speculator
speculator=true prompts=FILE           speculator
speculator=EAGLE prompts=FILE out=FILE                        out
speculator=EAGLE prompts=FILE out=LONG                        out
speculator=EAGLE prompts=FILE out=''                          out
speculator=EAGLE prompts=FILE decode.rule=block               block
speculator=EAGLE prompts=FILE decode=nosuch                   decode
prompts=FILE decode=ngram decode.proposer.most=0              most
prompts=FILE decode=ngram +decode.proposer.mots=3             most
prompts=FILE decode=union decode.proposer.parts=[{kind:nosuch}]           parts
prompts=FILE decode=hybrid decode.proposer.lookup.kind=sufix              suffix
prompts=FILE decode=union decode.proposer.parts=[{kind:drafter,folder:nosuch}]   nosuch
speculator=EAGLE prompts=FILE drafter_device=[cpu]            drafter_device
""",
    "inference tune": """
speculator=EAGLE                       prompts
prompts=FILE                           speculator
speculator=EAGLE prompts=nosuch        nosuch
speculator=nosuch prompts=FILE         speculator
speculator=EAGLE prompts=FILE count=0  count
speculator=EAGLE prompts=FILE new_tokens=0                    new_tokens
speculator=EAGLE prompts=FILE sequences=0                     sequences
speculator=EAGLE prompts=FILE out=FILE                        out
speculator=EAGLE prompts=FILE target.device=tp                target.device
decode=chain                           decode
""",
    "inference chat": """
speculator=nosuch                      speculator
speculator=FOLDER                      speculator
temperature=-1                         temperature
temperature=hot                        temperature
new_tokens=0                           new_tokens
capacity=1                             capacity
capacity=null                          capacity
decode.min_p=1                         decode.min_p
decode=ngram decode.proposer.least=9   least
target.device=tp                       target.device
""",
    "inference serve": """
speculator=nosuch                      speculator
port=-1                                port
port=65536                             port
port=http                              port
host=''                                host
host=no.such.host.invalid              host
rows=0                                 rows
capacity=1                             capacity
max_body=0                             max_body
grace=-1                               grace
decode=ngram                           decode
target.device=tp                       target.device
""",
}


GIVEN = {"inference": "speculator=EAGLE prompts=FILE ", "inference tune": "speculator=EAGLE prompts=FILE "}  # what these need


def _read(door: str, lines: list[str]) -> list[Hostile]:
    found = []
    for line in lines:
        arguments, _, says = line.rstrip().rpartition("  ")
        for word, value in (("LONG", LONG), ("EAGLE", str(EAGLE)), ("FILE", str(FILE)), ("FOLDER", str(FOLDER))):
            arguments, says = arguments.replace(word, value), says.replace(word, value)
        found.append(Hostile(door, arguments.split(), says.strip()))
    return found


def _all() -> list[Hostile]:
    common = COMMON.strip().splitlines()
    found = _read("train", common)
    for i, (door, text) in enumerate(LINES.items()):
        few = [] if door == "train" else [GIVEN.get(door, "") + line for line in common[i :: len(LINES)]]
        found += _read(door, [*text.strip().splitlines(), *few])
    return found


HOSTILE = _all()
