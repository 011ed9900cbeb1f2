// The state of the cluster, as the server sends it every two seconds while this tab is visible.

import { events, request } from "./api.js";

const PAUSE_MS = 1000;

export class Feed {
  constructor(onState, onLost) {
    this.onState = onState;
    this.onLost = onLost;
    this.stream = null;
    document.addEventListener("visibilitychange", () => this.follow());
    this.follow();
  }

  follow() {
    if (document.hidden) {
      this.stream?.abort();
      this.stream = null;
    } else if (!this.stream) {
      this.stream = new AbortController();
      this.run(this.stream.signal);
    }
  }

  async run(signal) {
    while (!signal.aborted) {
      try {
        // each stream ends after some seconds, so that a server can stop; the next one goes on
        const response = await request("console/state", { signal });
        for await (const data of events(response)) this.onState(JSON.parse(data));
      } catch (error) {
        if (signal.aborted) return;
        this.onLost(error);
        await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      }
    }
  }
}
