// Requests to the server that served this page.

import { decodeChunk } from "./chunk.js";
import { readEvents } from "./sse.js";

/** A refused request, with the server's own words. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Api {
  /** @param getKey returns the API key, or an empty text. */
  constructor(getKey) {
    this.getKey = getKey;
  }

  /** The name of the model that is served. */
  async model(signal) {
    const response = await this.request("v1/models", { signal });
    return (await response.json()).data[0].id;
  }

  /** The live feed's events, already parsed. */
  async *events(signal) {
    const response = await this.request("dashboard/events", { signal });
    for await (const { event, data } of readEvents(response)) {
      yield { event, data: JSON.parse(data) };
    }
  }

  /** Decoded chunks of a completion. */
  async *complete(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const response = await this.request(path, {
      method: "POST",
      headers,
      body: JSON.stringify(body),
      signal,
    });
    for await (const { data } of readEvents(response)) {
      if (data === "[DONE]") return;
      const chunk = decodeChunk(JSON.parse(data));
      if (chunk.error) throw new ApiError(chunk.error, 500);
      yield chunk;
    }
  }

  async request(path, options) {
    const key = this.getKey();
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers });
    if (!response.ok) throw new ApiError(await refusal(response), response.status);
    return response;
  }
}

async function refusal(response) {
  const fallback = `the server answered ${response.status}`;
  try {
    return (await response.json()).error?.message ?? fallback;
  } catch {
    return fallback;
  }
}
