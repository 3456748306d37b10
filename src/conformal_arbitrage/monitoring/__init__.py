"""What a deployed certificate's audits say: losses, evidence, limits, states, guard, age. Plain values, no I/O.

How a gateway uses it:

1. When the coin draws a decision, it writes a ledger row (seq, due) in the transaction of the Primary leg, whatever happens
   later. `decision_loss(decision)` without a verdict tells at once whether the loss is known; if so, no Guardian is asked.
2. When an audit, a grade or a label comes in, `decision_loss(decision, verdict)` gives the loss, or None while a part is
   missing; the gateway writes it into the row. An audit by other models than the decision's is no verdict.
3. At start, `Monitor.from_ledger(certificate_lines(certificate), losses, due)` recomputes everything. From then on
   `observe(rows)` takes rows that are new or whose outcome has become known, from whichever gateway, in any order.
4. `monitor.red(now)` after every batch: if true, the gateway writes the alarm with `standing(now).cause` and serves in safe
   mode. An alarm stands (`standing(now, alarmed=cause)`) until a person lifts it or a certificate is installed.
5. `monitor.standing(now)` for a page or metrics: the state, its reasons, limits and evidence; some milliseconds.
6. A new `Monitor`, with a ledger from seq 1, for every installation, lift, change of identities, and group; never for a new
   process. Requests that name a session count once per hour: `session_slot` is the key of that.
7. `served_loss` feeds a second Monitor of delivered answers; its amber goes into `standing(now, guardian_fails=...)`.
8. `Guard(...).shares(losses in the order they became known)` and `guarded_threshold` give the threshold in force.
   `refuse_combination` says what has no proof.

Losses are shares of the loss bound throughout: from 0 to 1, or from -1 to 1 for a net certificate. Times are numbers of one
unit.
"""
