// Rates made of totals: what changed between two states of the cluster.

export const ROLES = ["encode", "prefill", "decode"]; // in the order in which they work for a request

const HISTORY = 90; // states, so three minutes
const MIN_S = 0.5; // between two states that make a rate
const OLDER_S = 5; // a stream may begin with the state that was seen last, or with a little older one of another ingress

export class Rates {
  constructor() {
    this.before = null;
    this.replicas = new Map(); // by id
    this.history = new Map(); // tokens per second, by model
  }

  add(state) {
    const later = this.before ? state.at - this.before.at : null;
    if (later !== null && later > -OLDER_S && later < MIN_S) return; // the rates stay as they are
    const elapsed = later !== null && later > 0 ? later : null;
    const old = new Map(this.before ? allReplicas(this.before).map((replica) => [replica.engine_id, replica]) : []);
    this.replicas = new Map(
      allReplicas(state).map((replica) => [replica.engine_id, between(old.get(replica.engine_id), replica, elapsed)])
    );
    for (const { model, decode } of state.models) {
      const tokens = this.history.get(model) ?? [];
      if (elapsed) tokens.push(sum(decode, (replica) => this.of(replica).output));
      if (tokens.length > HISTORY) tokens.shift();
      this.history.set(model, tokens);
    }
    this.before = state;
  }

  of(replica) {
    return this.replicas.get(replica.engine_id) ?? between(undefined, replica, null);
  }
}

export const replicasOf = (model) => ROLES.flatMap((role) => model[role]);
export const allReplicas = (state) => state.models.flatMap(replicasOf);
export const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

export function received(replica) {
  return sum(Object.values(replica.handoffs?.results?.received ?? {}), (n) => n);
}

function between(old, replica, elapsed) {
  const risen = (of) => (old && elapsed ? Math.max(0, of(replica) - of(old)) : 0);
  const perSecond = (of) => (elapsed ? risen(of) / elapsed : 0);
  const queried = risen((r) => r.stats.prefix_queried_tokens);
  const stages = (replica.stats.parts.stages?.stages ?? []).map((_, i) => {
    const busy = risen((r) => r.stats.parts.stages?.stages[i]?.busy_s ?? 0);
    const working = busy + risen((r) => r.stats.parts.stages?.stages[i]?.wait_s ?? 0);
    return working ? busy / working : null; // the share of the time with steps under way in which it computed
  });
  const own = risen((r) => r.stats.parts.shared_experts?.steps.own ?? 0);
  const together = own + risen((r) => r.stats.parts.shared_experts?.steps.served ?? 0);
  return {
    own: together ? own / together : null, // share of the steps with engines that share experts
    output: perSecond((r) => r.stats.generation_tokens),
    input: perSecond((r) => r.stats.prefill_tokens),
    steps: perSecond((r) => r.stats.steps),
    hits: queried ? risen((r) => r.stats.prefix_hit_tokens) / queried : null,
    handoffs: risen(received),
    stages,
  };
}
