// Conversations of Vercel's AI SDK: `node vercel_ai.mjs ADDRESS PROVIDER` prints what it received as JSON.
// The packages lie in NODE_MODULES.

import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const require = createRequire(pathToFileURL(`${process.env.NODE_MODULES}/`));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { APICallError, Output, embedMany, generateText, isStepCount, streamText, tool } = await load('ai');
const { z } = await load('zod');
const { createAnthropic } = await load('@ai-sdk/anthropic');
const { createOpenAI } = await load('@ai-sdk/openai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');

const [address, provider] = process.argv.slice(2);
const baseURL = `${address}/v1`;
const options = { name: 'manta', baseURL, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true };
const models = {
  compatible: createOpenAICompatible(options),
  chat: createOpenAI(options).chat,
  responses: createOpenAI(options).responses,
  messages: createAnthropic({ baseURL, apiKey: 'none' }),
};
const named = models[provider];
const model = named('obedient');
const tools = {
  get_weather: tool({
    description: 'Return the weather of a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
};
const city = Output.object({ schema: z.object({ name: z.string(), population: z.number().int() }) });

const steps = (result) =>
  result.steps.map((step) => ({
    text: step.text,
    calls: step.toolCalls.map(({ toolName, input }) => [toolName, input]),
    results: step.toolResults.map(({ output }) => output),
    finish: step.finishReason,
  }));

async function whole(request) {
  const result = await generateText({ model, maxRetries: 0, maxOutputTokens: 500, ...request });
  return { text: result.text, steps: steps(result), usage: result.usage, warnings: result.warnings, result };
}

async function streamed(request) {
  const result = streamText({ model, maxRetries: 0, maxOutputTokens: 500, onError: () => {}, ...request });
  const parts = [];
  for await (const part of result.stream ?? result.fullStream) {
    if (part.type === 'error') throw part.error;
    parts.push(part);
  }
  const text = await result.text;
  const deltas = parts.filter((part) => part.type === 'text-delta').map((part) => part.text);
  return { text, deltas, steps: steps({ steps: await result.steps }), usage: await result.usage, result };
}

async function refused(ask, request) {
  try {
    await ask(request);
    return 'not refused';
  } catch (error) {
    const { statusCode, message, isRetryable } = error;
    return { isCallError: APICallError.isInstance(error), statusCode, message, isRetryable };
  }
}

const plain = ({ result, ...rest }) => rest;
const answers = {};
for (const [name, ask] of Object.entries({ whole, streamed })) {
  const object = await ask({ output: city, prompt: 'Describe Paris.' });
  answers[name] = {
    hello: plain(await ask({ system: 'Be brief.', prompt: 'hello' })),
    agent: plain(await ask({ tools, stopWhen: isStepCount(3), prompt: 'call get_weather {"city": "Paris"}' })),
    required: plain(await ask({ tools, toolChoice: 'required', prompt: 'call get_weather {"city": "Paris"}' })),
    object: await object.result.output,
    unknown: await refused(ask, { model: named('other'), prompt: 'hello' }),
    invalid: await refused(ask, { topP: 7, prompt: 'hello' }),
  };
}
if (provider === 'compatible') {
  const { embeddings, usage } = await embedMany({
    model: createOpenAICompatible(options).embeddingModel('obedient'),
    values: ['one', 'another one'],
  });
  answers.embeddings = { embeddings, usage };
}
console.log(JSON.stringify(answers));
