-- How an attempt ended: id, fence, event, target, detail, reason, mean_reward, oldest, payload or ''
local id, fence, event, target = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local r = load(id)
if not r then return {'fenced', ''} end
if r.fence ~= fence then return {'fenced', r.state} end
if r.state ~= 'leased' then
  if r.report == event then return {'ok'} end
  return {'fenced', r.state}
end
local fields = {report = event, mean_reward = ARGV[8]}
if ARGV[7] ~= '' then fields.reason = ARGV[7] end
if event == 'complete' then
  fields.oldest = ARGV[9]
  fields.kept = '1'
  redis.call('SET', key('payload', id), ARGV[10])
end
move(r, event, target, ARGV[6], fields)
return finish({'ok'})
