// Unpacks the registry's Chromium into TMPDIR and tells where it is.
process.env.AWS_LAMBDA_JS_RUNTIME ??= "nodejs22.x"; // else its libraries stay packed
const { default: chromium } = await import("@sparticuz/chromium");
console.log(JSON.stringify({ path: await chromium.executablePath() }));
