// Ask a question by Vercel's ai package, whole and streamed; print both answers as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [base, question, packages] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(createRequire(`${packages}/`).resolve(name)));
const { generateText, streamText } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const provider = createOpenAICompatible({ name: "pagewire", baseURL: `${base}/v1` });
const settings = { model: provider("embedded"), prompt: question, temperature: 0, maxRetries: 0 };
const whole = (await generateText(settings)).text;
const streamed = await streamText(settings).text;
console.log(JSON.stringify([whole, streamed]));
