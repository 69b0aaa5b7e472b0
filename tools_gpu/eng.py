"""One generation on the device: small case on all axes, then 96 x 128."""
import sys, json, time, os
from dataclasses import replace
from deeptwin.parity.card import load_card
from deeptwin.parity.gate import Job, Runner, Settings, plan
from deeptwin.parity import report
g, out = sys.argv[1], sys.argv[2]
card = load_card("engine"); op = card.op("serve_kernels")
jobs = [j for j in plan(card, op, full=False, device="cuda") if j.case.generation == g and (j.case.requests > 2 or g == "v3")]
jobs.sort(key=lambda j: j.case.requests)
t0 = time.time(); rows = []
def note(o):
    line = f"{time.time()-t0:6.1f} {o.status.value} {o.case} {o.check} {o.message[:700]}"
    print(line, flush=True)
    rows.append({"case": o.case, "check": o.check, "status": o.status.value, "message": o.message, "seconds": o.seconds})
    open(os.path.join(out, f"engine-{g}.json"), "w").write(json.dumps(rows))
with Runner(Settings(device="cuda", jobs=1, timeout=170.0, seed=0, full=False, relations=True), note) as r:
    for job in jobs:
        r.run_job(job)
from deeptwin.parity.environment import facts
open(os.path.join(out, f"facts.json"), "w").write(json.dumps(facts("cuda")))
