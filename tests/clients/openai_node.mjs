// What a Node program does with the npm package `openai`: prints one JSON object of what it saw.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const question = [{ role: "user", content: "What is the capital of France?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const base = { model, temperature: 0, max_tokens: 60 };
const seen = {};

seen.models = (await client.models.list()).data.map((entry) => entry.id);

const whole = await client.chat.completions.create({ ...base, messages: question });
seen.whole = { text: whole.choices[0].message.content, finish: whole.choices[0].finish_reason, usage: whole.usage };

const stream = await client.chat.completions.create({
  ...base,
  messages: question,
  stream: true,
  stream_options: { include_usage: true },
});
seen.streamed = { text: "", chunks: 0 };
for await (const chunk of stream) {
  seen.streamed.chunks += 1;
  seen.streamed.text += chunk.choices[0]?.delta?.content ?? "";
  seen.streamed.finish = chunk.choices[0]?.finish_reason ?? seen.streamed.finish;
  seen.streamed.usage = chunk.usage ?? seen.streamed.usage;
}

const called = await client.chat.completions.stream({ ...base, messages: weather, tools }).finalChatCompletion();
seen.tool = called.choices[0].message.tool_calls[0].function;
seen.tool_finish = called.choices[0].finish_reason;

const answered = await client.chat.completions
  .runTools({
    ...base,
    messages: weather,
    tools: [
      {
        type: "function",
        function: { ...tools[0].function, parse: JSON.parse, function: ({ city }) => `sunny in ${city}, 21 degrees` },
      },
    ],
  })
  .on("functionToolCallResult", (result) => (seen.tool_result = result))
  .finalContent();
seen.after_tool = answered;

const scored = await client.chat.completions.create({
  ...base,
  messages: question,
  n: 2,
  logprobs: true,
  top_logprobs: 3,
});
seen.choices = scored.choices.map((choice) => choice.logprobs.content.map((entry) => entry.top_logprobs.length));

const text = await client.completions.create({ ...base, prompt: "The capital of France is", max_tokens: 4 });
seen.completion = text.choices[0].text;

seen.errors = {};
for (const [name, body] of Object.entries({
  model: { model: "gpt-9", messages: question },
  temperature: { ...base, messages: question, temperature: 9 },
})) {
  try {
    await client.chat.completions.create(body);
  } catch (error) {
    seen.errors[name] = {
      type: error.constructor.name,
      known: error instanceof OpenAI.APIError,
      status: error.status,
      code: error.code,
      param: error.param,
    };
  }
}

console.log(JSON.stringify(seen));
