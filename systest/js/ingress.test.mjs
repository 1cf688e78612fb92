// A server in the sandbox, reached as a browser would.
import assert from 'node:assert/strict'
import http from 'node:http'
import { test } from 'node:test'
import { eventually, origin, shared } from './support.mjs'

const it = shared()

function get(path, headers) {
  return new Promise((resolve, reject) => {
    http.get(origin + path, { headers }, (answer) => {
      let body = ''
      answer.on('data', (piece) => { body += piece })
      answer.on('end', () => resolve({ status: answer.statusCode, body, headers: answer.headers }))
    }).on('error', reject)
  })
}

test('by headers, path and host', async () => {
  const { sandbox } = it
  await sandbox.files.write('/home/user/www/index.html', 'hello')
  await sandbox.commands.run('exec python3 -m http.server 8000 --bind 127.0.0.1', {
    background: true,
    cwd: '/home/user/www',
    timeoutMs: 0,
  })
  const headers = { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '8000' }
  await eventually(async () => (await get('/', headers)).status === 200)
  assert.equal((await get('/', headers)).body, 'hello')
  assert.equal((await get(`/sandbox/${sandbox.sandboxId}/8000/index.html`)).body, 'hello')
  assert.equal((await get('/', { host: `8000-${sandbox.sandboxId}.localhost` })).body, 'hello')
  assert.ok(sandbox.getHost(8000).startsWith(`8000-${sandbox.sandboxId}.`))
})

test('a closed port', async () => {
  const { sandbox } = it
  const answer = await get('/', { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '4567' })
  assert.equal(answer.status, 502)
  assert.deepEqual(JSON.parse(answer.body), {
    sandboxId: sandbox.sandboxId,
    message: 'The sandbox is running but port is not open',
    port: 4567,
    code: 502,
  })
})
